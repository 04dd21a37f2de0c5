"""The logs of a run: those of its ranks merged by time, and what `--follow` shows."""
