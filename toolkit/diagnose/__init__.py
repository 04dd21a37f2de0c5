"""What is wrong with the machines below a run."""
