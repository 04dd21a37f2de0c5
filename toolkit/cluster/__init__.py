"""Facts about where we are: nodes, ranks, interfaces, and what Slurm says.

Nothing here imports torch or submitit: the login node and ``toolkit --help`` come through this package.
"""
