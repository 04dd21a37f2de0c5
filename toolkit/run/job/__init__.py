"""The job as Slurm sees it: its state, its nodes, how they have behaved."""
