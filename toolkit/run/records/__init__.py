"""What is written about a run, and who owns it."""
