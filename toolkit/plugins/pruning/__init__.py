"""`train.pruning`: weights that become 0 and stay 0, see `toolkit.plugins.pruning.pruning`."""
