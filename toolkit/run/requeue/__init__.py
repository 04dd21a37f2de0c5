"""Brings a job back: Slurm's requeue, follow-up jobs, the watch of the batch host."""
