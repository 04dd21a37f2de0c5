"""Facts about the current place: nodes, ranks, network interfaces, and what Slurm reports."""
