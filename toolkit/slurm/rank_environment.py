"""Decides, on each rank's own node, on its variables for torch, NCCL, gloo and OpenMP.

All ranks use it, those of foreign scripts too, under every launcher. It loads nothing heavy: a foreign rank pays for
it before its own imports.
"""

from __future__ import annotations

from collections.abc import Mapping

from toolkit.base.errors import PlacementError
from toolkit.slurm import network, placement
from toolkit.slurm.placement import Placement


def environment(place: Placement, environ: Mapping[str, str], cpus_per_task: int) -> dict[str, str]:
    """Return the variables of torch, NCCL, gloo and OpenMP for this node. Those that the user has set are left out."""
    values = placement.rank_environment(place)
    # A supervised launch without an address: the supervisor runs where srun runs.
    if environ.get("TOOLKIT_SUPERVISED") == "1" and "MASTER_ADDR" not in environ:
        if "SLURM_LAUNCH_NODE_IPADDR" not in environ:
            raise PlacementError(
                "TOOLKIT_SUPERVISED=1 is set, and neither MASTER_ADDR nor SLURM_LAUNCH_NODE_IPADDR says where the "
                "supervisor is; if none started this process, unset TOOLKIT_SUPERVISED"
            )
        values["MASTER_ADDR"] = environ["SLURM_LAUNCH_NODE_IPADDR"]  # where srun runs, so does the store host
    key = placement.launch_key(environ)
    if key is not None and "TOOLKIT_LAUNCH_KEY" not in environ:
        values["TOOLKIT_LAUNCH_KEY"] = _file_name(key)
    # The interface is the one that reaches the rendezvous, or the node of srun.
    peer = values.get("MASTER_ADDR") or environ.get("MASTER_ADDR") or environ.get("SLURM_LAUNCH_NODE_IPADDR")
    if peer is not None:
        values.update(network.rank_network_environment(environ, peer))
    if "OMP_NUM_THREADS" not in environ:
        values["OMP_NUM_THREADS"] = environ.get("SLURM_CPUS_PER_TASK", str(cpus_per_task))
    return values


def _file_name(key: str) -> str:
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in key)
