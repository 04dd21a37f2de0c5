"""A run's checkpoints as files: listed, verified, compared, exported, pruned."""

from toolkit.registry import Plugin

PLUGIN = Plugin("checkpoints", commands={"checkpoint": "toolkit.plugins.checkpoints.command"})
