"""The strategy tensor: ranks of a group compute each layer together, see `toolkit.plugins.tensor.layout`."""
