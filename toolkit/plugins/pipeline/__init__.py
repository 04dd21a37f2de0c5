"""The strategy pipeline: each rank has some of the model's layers, see `toolkit.plugins.pipeline.strategy`."""
