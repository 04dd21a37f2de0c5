"""The strategy auto: see `toolkit.plugins.auto.strategy`."""
