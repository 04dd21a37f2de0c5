"""`toolkit report` and `compare`: runs as a page, and what differs between them."""

from toolkit.registry import Plugin

PLUGIN = Plugin(
    "report",
    commands={name: f"toolkit.plugins.report.commands.{name}" for name in ("report", "compare")},
)
