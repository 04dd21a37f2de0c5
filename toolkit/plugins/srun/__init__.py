"""Ranks that srun starts: over MPI, and in containers of the site."""
