"""`toolkit checkpoint`: a run's checkpoints as files."""
