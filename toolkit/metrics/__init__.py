"""What a run reports: `meters` measure the loop, `sinks` write scalars to TensorBoard and JSON lines."""
