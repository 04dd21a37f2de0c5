"""`toolkit watch`: runs on the screen, kept up to date."""

from toolkit.registry import Plugin

PLUGIN = Plugin("watch", commands={"watch": "toolkit.plugins.watch.command"})
