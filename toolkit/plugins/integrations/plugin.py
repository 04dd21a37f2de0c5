"""Loops of Lightning, transformers and accelerate."""

from toolkit.registry import Plugin

PLUGIN = Plugin("integrations", adapters={"integrations": "toolkit.plugins.integrations"})
