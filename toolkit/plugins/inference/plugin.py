"""Trained models: `toolkit evaluate`, `generate` and `export`."""

from toolkit.registry import Plugin

PLUGIN = Plugin(
    "inference",
    commands={name: f"toolkit.plugins.inference.commands.{name}" for name in ("evaluate", "generate", "export")},
)
