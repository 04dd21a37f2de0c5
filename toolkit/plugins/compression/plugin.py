"""`strategy.compression`: gradients that are sent with fewer bits, or in part."""

from toolkit.registry import Plugin

PLUGIN = Plugin("compression", hooks={"compressed_gradients": "toolkit.plugins.compression.layouts:build"})
