"""The strategy local_sgd, see `toolkit.plugins.local_sgd.strategy`."""
