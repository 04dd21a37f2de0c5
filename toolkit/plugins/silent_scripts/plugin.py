"""Finds scripts that hang although they report nothing to the toolkit, as those of `toolkit exec`."""

from toolkit.registry import Plugin

PLUGIN = Plugin("silent_scripts", hooks={"watch_script": "toolkit.plugins.silent_scripts.silence:start_watch"})
