"""`toolkit logs`: a run's logs, those of its ranks merged by time. `--follow`: how a run gets on."""

from toolkit.registry import Plugin

PLUGIN = Plugin(
    "logs",
    commands={"logs": "toolkit.plugins.logs.command"},
    hooks={"follow": "toolkit.plugins.logs.progress:follow"},
)
