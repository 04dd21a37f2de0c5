"""Gradients that are sent with fewer bits, or in part: see `toolkit.plugins.compression.schemes`."""
