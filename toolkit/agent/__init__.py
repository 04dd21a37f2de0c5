"""One process on each node of a job: it starts the ranks, by forks of a process that has imported torch."""
