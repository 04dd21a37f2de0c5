"""The job as Slurm sees it: its nodes, its requeue, its follow-up jobs."""
