"""`toolkit logs`: a run's logs, those of its ranks merged by time. `toolkit follow`, `--follow`: how a run gets on."""

from toolkit.registry import Plugin

PLUGIN = Plugin(
    "logs",
    commands={"logs": "toolkit.plugins.logs.command", "follow": "toolkit.plugins.logs.follow_command"},
    hooks={"follow": "toolkit.plugins.logs.progress:follow"},
)
