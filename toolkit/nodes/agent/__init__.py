"""The agent: one process on each node, which starts the ranks. It forks them from a process with torch imported."""
