"""A second place for a run's checkpoints, on another disk."""
