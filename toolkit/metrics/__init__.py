"""What a run reports: `meters` measure the loop, `sinks` write to TensorBoard and JSON lines."""
