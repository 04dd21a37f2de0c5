"""`strategy.compression`: gradients that are sent with fewer bits, or in part."""

from toolkit.registry import Plugin

PLUGIN = Plugin("compression", layouts={"compressed": "toolkit.plugins.compression.layouts:build"})
