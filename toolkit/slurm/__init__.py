"""Facts about the current place: nodes, ranks, network interfaces, and what Slurm reports.

Nothing here imports torch or submitit: the login node and ``toolkit --help`` import this package.
"""
