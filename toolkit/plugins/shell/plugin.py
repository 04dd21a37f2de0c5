"""`toolkit shell`: a shell with what a run has, to debug in."""

from toolkit.registry import Plugin

PLUGIN = Plugin("shell", commands={"shell": "toolkit.plugins.shell.command"})
