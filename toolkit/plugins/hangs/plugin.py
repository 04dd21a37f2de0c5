"""Finds out which rank of a run that hangs is to blame, and whether scripts hang that report nothing."""

from toolkit.registry import Plugin

PLUGIN = Plugin(
    "hangs",
    commands={"stacks": "toolkit.plugins.hangs.command"},
    hooks={"investigate_hangs": "toolkit.plugins.hangs.investigation:Investigation"},
)
