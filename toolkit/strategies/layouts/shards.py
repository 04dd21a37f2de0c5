"""fsdp and zero: each rank keeps 1/N of every parameter, gradient and optimizer state. Both are torch's FSDP2.

fsdp frees a block's weights after its forward pass and gathers them again for the backward pass. zero keeps them until
then, which saves a third of what is sent and costs the memory of the whole weights. (These are stages 3 and 2 of ZeRO,
https://arxiv.org/abs/1910.02054, except that between steps the weights lie sharded in both.)

With ``strategy.mesh.replicas`` the ranks form several copies of the model, each in parts. Weights are gathered within a
copy only, and the summed parts of the gradients are then summed once over the copies (hybrid sharding).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.modules.batchnorm import _BatchNorm

from toolkit.base import logs, torch_version
from toolkit.base.errors import ConfigError, listing
from toolkit.config import MeshConfig, choose
from toolkit.ranks.session import Session
from toolkit.strategies.layouts import Layout
from toolkit.strategies.layouts.mesh import describe, device_mesh, hand_out, is_first, make_on_rank_0, part_of, share_of
from toolkit.strategies.models import blocks, checkpoint_activations
from toolkit.strategies.objective import TrialPass
from toolkit.strategies.protocol import ModelFactory

log = logs.get(__name__)


class Shards(Layout):
    """See :class:`~.Layout`. With bf16 the blocks gather and compute in it; gradients are summed in fp32.

    ``compression`` bf16 sends and sums gradients in bf16, which halves what is sent of them.
    """

    passes_are_joint = True

    _model: FSDPModule

    def __init__(
        self,
        session: Session,
        sizes: MeshConfig,
        *,
        precision: str,
        compile: bool,
        recompute: int,
        reshard_after_forward: bool = True,
        cpu_offload: bool = False,
        compression: str = "none",
        prefetch_blocks: int = 1,
    ) -> None:
        if session.device.type == "cpu":
            torch_version.refuse_older([torch_version.SHARDS_ON_CPUS])
        self.share = share_of(session, sizes)
        self.counts = is_first(session, sizes)
        self._session = session
        self._sizes = sizes
        self._offloads = cpu_offload
        self._device = session.device
        self._bf16 = choose("train.precision", precision, {"fp32": False, "bf16": True})
        self._sums = choose("strategy.compression", compression, {"none": torch.float32, "bf16": torch.bfloat16})
        self._compile = compile
        self._recompute = recompute
        self._reshards = reshard_after_forward
        self._ahead = prefetch_blocks

    def place(self, make: ModelFactory, trial: TrialPass) -> nn.Module:
        """Shard the model. Raises ConfigError for a model that cannot be sharded."""
        mesh = device_mesh(self._session, self._sizes, ("shards",))
        model = make_on_rank_0(make)
        # Rank 0 keeps the whole tensors for hand_out(); cutting and sharding below change the model's parameters.
        whole = {name: parameter.detach() for name, parameter in model.named_parameters()}
        buffers = dict(model.named_buffers())
        self._refuse(model)
        self.cut(model, mesh, trial)
        data = part_of(mesh, "replicas", "shards")
        assert data is not None
        self._shard(model, data)
        if any(tensor.is_meta for tensor in [*whole.values(), *buffers.values()]):
            # A model made on meta gets its memory only now, as parts. Buffers lie where they are used.
            model.to_empty(device="cpu" if self._offloads else self._device)
            for module in model.modules():
                for name, buffer in module.named_buffers(recurse=False):
                    setattr(module, name, buffer.to(self._device))
        hand_out(whole, model, self._device, self.uncut)
        return model

    def cut(self, model: nn.Module, mesh: DeviceMesh, trial: TrialPass) -> None:
        """Cut layers that ranks compute together, before a rank's part of them is sharded: none here."""
        return

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs)  # type: ignore[operator]

    @contextmanager
    def without_sync(self) -> Iterator[None]:
        """Keep whole gradients on each rank meanwhile; zero keeps the gathered weights, too."""
        self._model.set_requires_gradient_sync(False)
        self._model.set_reshard_after_backward(self._reshards)
        try:
            yield
        finally:
            self._model.set_requires_gradient_sync(True)
            self._model.set_reshard_after_backward(True)

    def precision(self) -> AbstractContextManager[object]:
        return nullcontext()

    def rest(self) -> None:
        """Shard the root's weights again, and with zero all weights. They would stay gathered until a backward pass."""
        for module in self._model.modules():  # type: ignore[attr-defined]
            if isinstance(module, FSDPModule):
                module.reshard()

    def _shard(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Shard each block, then the rest. Recomputing, compiling and sharding fit together in this order."""
        policy = MixedPrecisionPolicy(torch.bfloat16 if self._bf16 else None, self._sums)
        offload = OffloadPolicy()
        if self._offloads:
            if self._device.type == "cpu":
                why = "ranks without a GPU have all in host memory anyway"
                log.warning("strategy.cpu_offload changes nothing here: %s", why)
            offload = CPUOffloadPolicy(pin_memory=self._device.type != "cpu")
        parts = blocks(model)
        if self._recompute:
            checkpoint_activations(model, self._recompute)
        for part in parts or [model] if self._compile else ():
            part.compile()
        # Blocks first: the root then shards only what no block has.
        for part in parts:
            fully_shard(part, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=self._reshards)
        self._model = fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=offload)
        if self._ahead > 1:  # torch gathers one block ahead by itself
            _prefetch([self._model, *parts], self._ahead)  # type: ignore[list-item]
        log.info("sharded over a mesh of %s: %d blocks and the rest", describe(self._sizes), len(parts))

    def _refuse(self, model: nn.Module) -> None:
        scalars = [name for name, parameter in model.named_parameters() if not parameter.ndim]
        if scalars:
            raise ConfigError(
                f"strategy.name: {listing(scalars, 3)} has no dimension to cut; give it the shape (1,), or use ddp"
            )
        # Find parameters that a block shares with another one, or with none: 0 stands for modules outside of blocks.
        owners: dict[nn.Module, int] = {}
        for number, block in enumerate(blocks(model), 1):
            owners |= dict.fromkeys(block.modules(), number)
        users: dict[Tensor, set[int]] = defaultdict(set)
        names: dict[Tensor, str] = {}
        for path, module in model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                users[parameter].add(owners.get(module, 0))
                names.setdefault(parameter, f"{path}.{name}")
        shared = [names[parameter] for parameter, found in users.items() if len(found) > 1]
        if shared:
            raise ConfigError(
                f"strategy.name: blocks of this model share parameters ({listing(shared, 3)}), which would be gathered "
                "and let go at different times; use ddp"
            )
        norms = [name for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
        if self._bf16 and norms:
            raise ConfigError(
                f"train.precision: {listing(norms, 3)} keeps statistics in fp32, which do not go with sharded weights "
                "in bf16; use fp32, ddp, or a model without BatchNorm"
            )


def _prefetch(modules: Sequence[FSDPModule], ahead: int) -> None:
    """Gather the weights of ``ahead`` modules before they are needed. ``modules`` are the root and then the blocks."""
    for number, module in enumerate(modules):
        module.set_modules_to_forward_prefetch([*modules[number + 1 : number + 1 + ahead]])
        module.set_modules_to_backward_prefetch([*reversed(modules[max(1, number - ahead) : number])])
    modules[0].set_modules_to_backward_prefetch([*reversed(modules[-ahead:])])
