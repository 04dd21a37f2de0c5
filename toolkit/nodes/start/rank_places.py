"""The places of an attempt's ranks, and the variables that srun would set for them."""

from __future__ import annotations

from toolkit.base import hostlist
from toolkit.nodes.allocation import Allocation
from toolkit.slurm.placement import Placement


def places_by_host(allocation: Allocation) -> dict[str, list[Placement]]:
    """Return the places of each node's ranks, by the node's name."""
    places: dict[str, list[Placement]] = {}
    for node_rank, (host, ranks) in enumerate(allocation.ranks_of.items()):
        places[host] = [
            Placement(
                rank=rank,
                world_size=allocation.world_size,
                local_rank=local_rank,
                local_world_size=len(ranks),
                node_rank=node_rank,
                nodes=len(allocation.hosts),
                host=host,
                launcher="supervisor",
            )
            for local_rank, rank in enumerate(ranks)
        ]
    return places


def srun_environment(allocation: Allocation) -> dict[str, str]:
    """Return the variables that srun would set alike for every task of this attempt.

    Scripts may read them. From srun(1), output variables. Empty without Slurm. Its size grows with the number of nodes:
    make it once, not for each rank.
    """
    if allocation.job_id is None:
        return {}
    counts = hostlist.compress_counts(allocation.tasks)
    return {
        **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS"), str(allocation.world_size)),
        **dict.fromkeys(("SLURM_NNODES", "SLURM_STEP_NUM_NODES"), str(len(allocation.hosts))),
        **dict.fromkeys(("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"), counts),
        "SLURM_STEP_NODELIST": hostlist.compress(allocation.hosts),
        "SLURM_CPUS_PER_TASK": str(allocation.cpus_per_task),
    }


def srun_rank_environment(place: Placement) -> dict[str, str]:
    """Return the variables that srun would set for one task alone."""
    first = place.rank - place.local_rank
    return {
        "SLURM_PROCID": str(place.rank),
        "SLURM_LOCALID": str(place.local_rank),
        "SLURM_NODEID": str(place.node_rank),
        "SLURM_GTIDS": ",".join(map(str, range(first, first + place.local_world_size))),
    }
