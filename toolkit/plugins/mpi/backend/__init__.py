"""A process group over mpi4py: `dist.backend: mpi` on a torch that was built without MPI.

torch sees a Python `ProcessGroup` (torch 2.11 knows no other way). A collective with ``async_op=False`` is MPI's
blocking one, called in the caller's thread. The others run in order in a thread of the group, on a communicator of its
own. That thread blocks as well: MPI's non-blocking collectives took 2 to 4 times as long (64 MB 75 ms instead of 18).
So all ranks must pass the same ``async_op``, as they do where each runs the same program. Messages between two ranks
never block: a pipeline sends both ways at once.

Sums of half precision are made in fp32 and rounded once. Tensors on a GPU go through host memory, unless
``TOOLKIT_MPI_CUDA=1`` says that this MPI reads GPU memory.
"""

from __future__ import annotations

from toolkit.base.errors import ConfigError

try:
    import mpi4py

    # Before any module of this package imports MPI itself, which would open and close it otherwise.
    mpi4py.rc.initialize = False  # a rank that only imports this module is no MPI process
    mpi4py.rc.finalize = False  # see `finalize`

    from toolkit.plugins.mpi.backend.group import finalize, launch_key, register
except (ImportError, RuntimeError) as failed:  # no mpi4py; mpi4py finds no MPI library
    raise ConfigError(
        f"dist.backend: mpi needs mpi4py and an MPI on every node: pip install slurm-batch-toolkit[mpi] ({failed})"
    ) from failed

__all__ = ["finalize", "launch_key", "register"]
