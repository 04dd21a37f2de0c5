"""One process on each node that starts the ranks, by forks of a process with torch imported."""
