"""`toolkit completion`: what a shell completes."""

from toolkit.registry import Plugin

PLUGIN = Plugin(
    "completion",
    commands={"completion": "toolkit.plugins.completion.command"},
    hooks={"shell_completion": "toolkit.plugins.completion.offers:main"},
)
