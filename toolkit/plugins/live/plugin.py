"""`toolkit set`, and what the ranks do about it and about other requests between two steps."""

from toolkit.registry import Plugin

PLUGIN = Plugin(
    "live",
    commands={"set": "toolkit.plugins.live.command"},
    hooks={"on_request": "toolkit.plugins.live.on_request:OnRequest"},
)
