"""Opening MPI, making the backend known to torch, and closing MPI."""

from __future__ import annotations

import os
import secrets
from typing import Any

import torch.distributed as dist
from mpi4py import MPI

from toolkit.base.errors import ConfigError, StoppedError
from toolkit.devices import accelerator
from toolkit.plugins.mpi.backend.group import NAME, MpiGroup

#: Open MPI spins while it waits. With more threads than cores (data workers, a second thread of ours), the ranks that
#: it waits for would lose whole time slices: 25 MB took 26 ms instead of 10 on a busy machine.
YIELD_VARIABLE = "OMPI_MCA_mpi_yield_when_idle"


def register() -> str:
    """Make the backend known to torch and return its name."""
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(
            NAME, _create, extended_api=True, devices=[*dict.fromkeys(("cpu", accelerator.built_for().type))]
        )
    return NAME


def launch_key(rank: int, size: int) -> str:
    """Return a name that all ranks of this launch have, and no other launch. Every rank must call it."""
    open_mpi(rank, size)
    return str(MPI.COMM_WORLD.bcast(secrets.token_hex(8)))


def _create(options: Any, _: object) -> MpiGroup:
    """Open a group. torch calls this on the members of each new group.

    The default group comes with an empty list of ranks.
    """
    ranks = list(options.global_ranks_in_group)
    # Each group gets its own communicator, so that its messages never meet those of another group. The default group
    # comes first, and opens MPI unless that has happened.
    if not ranks:
        open_mpi(options.group_rank, options.group_size)
        await_all(options.store, options.group_rank, options.group_size)
        return MpiGroup(MPI.COMM_WORLD.Dup(), options.group_rank, options.timeout)
    members = MPI.COMM_WORLD.Get_group().Incl(ranks)
    return MpiGroup(MPI.COMM_WORLD.Create_group(members), ranks[options.group_rank], options.timeout)


def open_mpi(rank: int, size: int) -> None:
    if not MPI.Is_initialized():
        os.environ.setdefault(YIELD_VARIABLE, "1")
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    check_world((rank, size), (MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()), MPI.Get_library_version())
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise ConfigError(
            "dist.backend: mpi needs MPI_THREAD_MULTIPLE, which this MPI was not built or not opened with "
            f"({_first_line(MPI.Get_library_version())}); use another MPI, or dist.backend: gloo"
        )


def await_all(store: dist.Store, rank: int, size: int) -> None:
    """Return when every rank has opened MPI. No message is sent before.

    Open MPI's ranks finish opening within some milliseconds of each other. A message from a rank that has finished
    crashes one that has not (pml/ob1, open-mpi/ompi issues 11438 and 13559: 1 in 67 launches on 4 nodes).
    """
    opened = [f"mpi_opened/{os.environ.get('TOOLKIT_ATTEMPT', '1')}/{other}" for other in range(size)]
    store.set(opened[rank], "1")
    store.wait(opened)


def check_world(ours: tuple[int, int], mpis: tuple[int, int], library: str) -> None:
    """Raise ConfigError unless MPI sees the ranks that were started. Both pairs are ``(rank, world size)``.

    A launcher that the MPI library does not know leaves each rank alone in a world of one, without a message.
    """
    if ours != mpis:
        raise ConfigError(
            f"dist.backend: mpi: rank {ours[0]} of {ours[1]} is rank {mpis[0]} of {mpis[1]} for MPI "
            f"({_first_line(library)}): this MPI does not know its launcher. Start the ranks with that MPI's own "
            "mpirun, or with srun --mpi=pmix (MPICH, Intel MPI: pmi2; `srun --mpi=list` shows what Slurm has), in a "
            "job of the toolkit by cluster.setup: [export SLURM_MPI_TYPE=pmix]"
        )


def finalize(_: type[BaseException] | None, error: BaseException | None, __: object) -> None:
    """Close MPI if all ranks come here. Called as the exit of a context.

    MPI waits in this for every rank, so after a failure it would wait for ever. A rank that ends without it tells the
    launcher that the job has failed, which is then right.
    """
    if (error is None or isinstance(error, StoppedError)) and MPI.Is_initialized() and not MPI.Is_finalized():
        MPI.Finalize()


def _first_line(text: str) -> str:
    return text.strip("\0\n ").splitlines()[0].split(", package")[0]
