"""Chooses a rank's backend and device. The ranks agree on them through the store before a process group is opened.

Without that a node whose torch sees no GPU would train on its CPU, or meet the others' NCCL with gloo: both sides then
wait for the time-out of the group.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from toolkit import registry
from toolkit.base.errors import ConfigError

#: Where NVIDIA's driver lists its GPUs, and the device files of other GPUs.
NVIDIA, OTHERS = Path("/proc/driver/nvidia/gpus"), Path("/dev/dri")


class Backend(Protocol):
    """A process group that a plugin brings, for a value of ``dist.backend``. A module may be one."""

    def register(self) -> str:
        """Make the group known to torch, and return torch's name of it. Opens nothing."""
        ...

    def launch_key(self, rank: int, world_size: int) -> str:
        """Return a name that all ranks of this launch have, and no other launch. Every rank calls it."""
        ...

    def finalize(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Close what is open, after the rank has ended so. The arguments are those of ``__exit__``."""
        ...


def backend_of_plugin(name: str) -> Backend | None:
    """Return what a plugin brings for ``dist.backend: name``; None where torch has it itself.

    torch's own MPI is preferred. Raises ConfigError where there is none, or it cannot be loaded.
    """
    if name in registry.CORE.backends or (name == "mpi" and dist.is_mpi_available()):
        return None
    found: Backend | None = registry.find("backends", name)
    if found is None:
        raise ConfigError(f"dist.backend: torch here has no {name}, and no plugin brings it")
    return found


def choose_backend(name: str) -> str:
    """Return torch's name of the backend. ``auto`` is NCCL with CUDA and gloo without."""
    if name == "auto":
        return "nccl" if torch.cuda.is_available() else "gloo"
    brought = backend_of_plugin(name)
    return name if brought is None else brought.register()


def agree(store: dist.Store, rank: int, world_size: int, backend: str, gpus: int) -> None:
    """Return when all ranks can open a group over ``backend``. ``gpus`` is the number asked for on each node.

    Every rank calls it, once. Raises ConfigError on all ranks if one of them sees none of the GPUs that were asked
    for, or would use another backend than rank 0. The error names that rank and its node.
    """
    refusal = _lack_of_gpus(backend, gpus)
    if world_size > 1:
        # torchrun keeps its store over restarts.
        key = f"toolkit/backend/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        if rank == 0:
            store.set(key, json.dumps([backend, _torch_build()]))
        main_backend, main_torch = json.loads(store.get(key))
        if not refusal and backend != main_backend:
            refusal = (
                f"this node would use {backend} ({_torch_build()}), and rank 0 uses {main_backend} ({main_torch}): all "
                "need the same kind of device and the same torch; leave the node out (cluster.exclude), or set "
                "dist.backend"
            )
        if refusal:
            store.set(f"{key}/refused", f"rank {rank} on {socket.gethostname()}: {refusal}")
        # The last rank publishes the outcome.
        if store.add(f"{key}/ready", 1) == world_size:
            is_refused = store.check([f"{key}/refused"])
            store.set(f"{key}/agreed", store.get(f"{key}/refused").decode() if is_refused else "")
        refusal = store.get(f"{key}/agreed").decode()
    if refusal:
        raise ConfigError(refusal)


def _lack_of_gpus(backend: str, gpus: int) -> str:
    """Say why this rank cannot have the GPU that it needs; empty if it has one or needs none."""
    if torch.cuda.is_available() or (backend != "nccl" and not gpus):
        return ""
    asked = f"cluster.gpus_per_node asks for {gpus} GPUs" if gpus else "dist.backend: nccl needs GPUs"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        why = ""
    except Exception as error:  # torch's own words: an old driver, no CUDA in this build
        why = f": {str(error).splitlines()[0]}"
    return (
        f"{asked}, and {_torch_build()} sees none on {socket.gethostname()}{why} (the node has {_gpus_of_node()}"
        f"{'' if hidden is None else f', CUDA_VISIBLE_DEVICES={hidden!r}'}); install a torch that is built for the "
        "node's GPUs and driver (pytorch.org/get-started), or set cluster.gpus_per_node=0 to train on CPUs"
    )


def _torch_build() -> str:
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    hip = getattr(torch.version, "hip", None)
    return f"torch {torch.__version__}, built for {f'ROCm {hip}' if hip else build}"


def _gpus_of_node() -> str:
    nvidia = len(list(NVIDIA.glob("*"))) if NVIDIA.is_dir() else 0
    if nvidia:
        return f"{nvidia} with NVIDIA's driver"
    others = len(list(OTHERS.glob("renderD*"))) if OTHERS.is_dir() else 0
    return f"no NVIDIA driver, and {others} other devices in {OTHERS}" if others else "no GPU driver"


def choose_device(store: dist.Store, backend: str, local_rank: int, local_world_size: int) -> torch.device:
    """Return the rank's device and make it current. All ranks of a node call it.

    It is the GPU of the local rank. Where Slurm lets a rank see some of the node's GPUs only (``--gpu-bind``), the
    ranks that see the same ones share them out. Raises ConfigError where that leaves a rank of NCCL without its own.
    """
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not visible:
        return torch.device("cpu")
    index = local_rank
    if local_world_size > 1:
        index = turn(store, local_rank, local_world_size, visible_gpus(visible))
    if index >= visible and backend == "nccl":
        raise ConfigError(
            f"local rank {local_rank} of {local_world_size} on {socket.gethostname()} has no GPU of its own: the "
            f"{visible} that it sees are those of {index} ranks before it; start as many ranks on a node as it has "
            "GPUs, and let Slurm hide none of them (--gpu-bind, --gpus-per-task)"
        )
    device = torch.device("cuda", index % visible)
    torch.cuda.set_device(device)
    return device


def turn(store: dist.Store, local_rank: int, local_world_size: int, visible: Sequence[str]) -> int:
    """Return the place of this rank's GPU among the ``visible`` ones.

    Where these are fewer than the node's ranks, it counts the ranks before this one that see the same.
    """
    key = f"toolkit/gpus/{socket.gethostname()}"
    own = json.dumps(visible)
    # Every rank writes anew what has not changed over torchrun's restarts.
    store.set(f"{key}/{local_rank}", own)
    if len(visible) >= local_world_size:
        return local_rank
    return sum(store.get(f"{key}/{other}").decode() == own for other in range(local_rank))


def visible_gpus(count: int) -> list[str]:
    """Return names of the visible GPUs that hold in every process of the node."""
    return [str(torch.cuda.get_device_properties(index).uuid) for index in range(count)]
