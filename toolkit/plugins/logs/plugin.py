"""`toolkit logs`: a run's logs, those of its ranks merged by time."""

from toolkit.registry import Plugin

PLUGIN = Plugin("logs", commands={"logs": "toolkit.plugins.logs.command"})
