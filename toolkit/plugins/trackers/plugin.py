"""`toolkit sync`: copies of runs' metrics in trackers of experiments."""

from toolkit.registry import Plugin

PLUGIN = Plugin("trackers", commands={"sync": "toolkit.plugins.trackers.command"})
