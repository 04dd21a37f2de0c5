"""What a run tells about itself: `meters` measure the loop, `sinks` write scalars to TensorBoard and JSON lines."""
