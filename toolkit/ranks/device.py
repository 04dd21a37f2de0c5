"""Chooses a rank's backend and device. The ranks agree on them through the store before a process group is opened.

Without that a node whose torch sees no GPU would train on its CPU, or meet the others' NCCL with gloo: both sides then
wait for the time-out of the group.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from toolkit import registry
from toolkit.base.errors import ConfigError
from toolkit.devices import accelerator, on_node
from toolkit.devices.kinds import is_of_devices


class Backend(Protocol):
    """A process group that torch does not have, for a value of ``dist.backend``. A module may be one."""

    def register(self) -> str:
        """Make the group known to torch, and return torch's name of it. Opens nothing."""

    def launch_key(self, rank: int, world_size: int) -> str:
        """Return a name that all ranks of this launch have, and no other launch. Every rank calls it."""

    def finalize(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Close what is open, after the rank has ended so. The arguments are those of ``__exit__``."""


def backend_of_plugin(name: str) -> Backend | None:
    """Return what there is for ``dist.backend: name``; None where torch has it itself.

    torch's own MPI is preferred. Raises ConfigError where there is none, or it cannot be loaded.
    """
    if registry.where("backends", name) == "torch.distributed" or (name == "mpi" and dist.is_mpi_available()):
        return None
    found: Backend | None = registry.find("backends", name)
    if found is None:
        raise ConfigError(f"dist.backend: torch here has no {name}, and no package brings it")
    return found


def choose_backend(name: str, tasks_per_gpu: int = 1) -> str:
    """Return torch's name of the backend. ``auto`` is that of the devices; gloo where ranks share a GPU."""
    if name == "auto":
        return accelerator.kind().backend if tasks_per_gpu == 1 else "gloo"
    brought = backend_of_plugin(name)
    return name if brought is None else brought.register()


def _lack_of_service(backend: str) -> str:
    """Say why a group over ``backend`` cannot serve this rank's device; empty if it can."""
    kind = accelerator.kind()
    serves = dist.Backend.backend_capability.get(backend, [kind.type])
    if kind.type in serves:
        return ""
    others = [name for name, types in dist.Backend.backend_capability.items() if kind.type in types and name != "fake"]
    return (
        f"dist.backend: {backend} serves {' and '.join(serves)}, and this rank's device is {kind.type}: use "
        f"dist.backend={(others or ['mpi'])[0]}"
    )


def agree_on_backend(store: dist.Store, rank: int, world_size: int, backend: str, gpus: int) -> None:
    """Return when all ranks can open a group over ``backend``. ``gpus`` is the number asked for on each node.

    Every rank calls it, once. Raises ConfigError on all ranks if one of them sees none of the GPUs that were asked
    for, or would use another backend than rank 0. The error names that rank and its node.
    """
    refusal = _lack_of_gpus(backend, gpus) or _lack_of_service(backend)
    if world_size > 1:
        # torchrun keeps its store over restarts.
        key = f"toolkit/backend/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        kind = accelerator.kind().name
        if rank == 0:
            store.set(key, json.dumps([backend, kind, accelerator.build()]))
        main_backend, main_kind, main_torch = json.loads(store.get(key))
        if not refusal and backend != main_backend:
            refusal = (
                f"this node would use {backend} ({accelerator.build()}), and rank 0 uses {main_backend} "
                f"({main_torch}): all need the same kind of device and the same torch; leave the node out "
                "(cluster.exclude), or set dist.backend"
            )
        elif not refusal and kind != main_kind and is_of_devices(backend):
            refusal = (
                f"this rank has {kind} ({accelerator.build()}), rank 0 has {main_kind} ({main_torch}), and {backend} "
                "connects devices of one kind: set dist.backend=gloo, or leave the node out (cluster.exclude)"
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
    if accelerator.count() or not (gpus or is_of_devices(backend)):
        return ""
    asked = f"cluster.gpus_per_node asks for {gpus} GPUs" if gpus else f"dist.backend: {backend} needs GPUs"
    why = accelerator.why_none()
    return (
        f"{asked}, and {accelerator.build()} sees none on {socket.gethostname()}{f': {why}' if why else ''} "
        f"({on_node.described(os.environ)}); install a torch that is built for the node's GPUs and driver "
        "(pytorch.org/get-started), or set cluster.gpus_per_node=0 to train on CPUs"
    )


def choose_device(store: dist.Store, backend: str, local_rank: int, tasks_per_gpu: int = 1) -> torch.device:
    """Return the rank's device and make it current. All ranks of a node call it.

    It is the GPU of the local rank, or that of ``tasks_per_gpu`` neighbouring ones. Where Slurm lets a rank see some of
    the node's GPUs only (``--gpu-bind``), the ranks that see the same ones share them out. Raises ConfigError where
    that leaves a rank without its own that NCCL or XCCL is to connect.
    """
    visible = accelerator.count()
    if not visible:
        return torch.device("cpu")
    index, local_world_size = local_rank, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if local_world_size > 1:
        index = choose_gpu_index(store, local_rank, local_world_size, accelerator.identities(visible))
    index //= tasks_per_gpu
    if index >= visible and is_of_devices(backend):
        raise ConfigError(
            f"local rank {local_rank} of {local_world_size} on {socket.gethostname()} has no GPU of its own: the "
            f"{visible} that it sees are those of {index} ranks before it; start as many ranks on a node as it has "
            "GPUs, and let Slurm hide none of them (--gpu-bind, --gpus-per-task), or set cluster.tasks_per_gpu"
        )
    device = torch.device(accelerator.kind().type, index % visible)
    accelerator.module_of(device).set_device(device)
    return device


def choose_gpu_index(store: dist.Store, local_rank: int, local_world_size: int, visible: Sequence[str]) -> int:
    """Return the place of this rank's GPU among the ``visible``. If too few, ranks that see the same take turns."""
    key = f"toolkit/gpus/{socket.gethostname()}"
    own = json.dumps(visible)
    # Every rank writes anew what has not changed over torchrun's restarts.
    store.set(f"{key}/{local_rank}", own)
    if len(visible) >= local_world_size:
        return local_rank
    return sum(store.get(f"{key}/{other}").decode() == own for other in range(local_rank))
