"""What the supervisor writes about a run, and who owns the run."""
