"""fsdp and zero: each rank keeps 1/N of every parameter, its gradient and its optimizer state (torch's FSDP2).

The parameters of a block are gathered from all ranks for the time in which it computes, and its gradients are summed
straight into the parts that their owners keep. ``reshard_after_forward`` is the difference between the two: fsdp lets
go of a block's weights after its forward pass and gathers them again for the backward pass; zero keeps them until then,
which saves a third of what is sent and costs the memory of the whole weights. (These are stages 3 and 2 of ZeRO,
https://arxiv.org/abs/1910.02054, but that between steps the weights lie sharded in both.)

The first weights are rank 0's, bit for bit those of the unsharded model. Only rank 0 makes it, in host memory; the
others make it without memory (torch's ``meta`` device) and receive their parts, one tensor at a time. Letting each rank
draw its own part would need to know in which order any model draws.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules.batchnorm import _BatchNorm

from toolkit import logs
from toolkit.dist.batch import Share
from toolkit.dist.session import Session
from toolkit.dist.state import Entry
from toolkit.errors import ConfigError, listing
from toolkit.strategies.blocks import blocks, checkpoint_activations
from toolkit.strategies.layout import local
from toolkit.strategies.protocol import ModelFactory

log = logs.get(__name__)


class Shards:
    """See :class:`~.layout.Layout`. With bf16 the blocks gather and compute in it; gradients are summed in fp32."""

    passes_are_joint = True

    _model: FSDPModule

    def __init__(
        self,
        session: Session,
        *,
        bf16: bool,
        compile: bool,
        recompute: bool,
        reshard_after_forward: bool = True,
    ) -> None:
        self.share = Share(session.rank, session.world_size)
        self._device = session.device
        self._bf16 = bf16
        self._compile = compile
        self._recompute = recompute
        self._reshards = reshard_after_forward

    def place(self, make: ModelFactory) -> nn.Module:
        """Raises ConfigError for a model that cannot be sharded."""
        mesh = init_device_mesh(self._device.type, (dist.get_world_size(),))
        model = make() if mesh.get_rank() == 0 else without_memory(make)
        whole = {name: parameter.detach() for name, parameter in model.named_parameters()}
        buffers = dict(model.named_buffers())
        self._refuse(model)
        self._shard(model, mesh)
        if any(tensor.is_meta for tensor in [*whole.values(), *buffers.values()]):
            model.to_empty(device=self._device)
        _scatter(whole, model, mesh)
        return model

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self._model(inputs)  # type: ignore[operator]
        return outputs

    @contextmanager
    def without_sync(self) -> Iterator[None]:
        """Whole gradients stay on each rank meanwhile; zero keeps the gathered weights, too."""
        self._model.set_requires_gradient_sync(False)
        self._model.set_reshard_after_backward(self._reshards)
        try:
            yield
        finally:
            self._model.set_requires_gradient_sync(True)
            self._model.set_reshard_after_backward(True)

    def average(self) -> None:
        """The backward pass has done it."""

    def state(self) -> dict[str, Entry]:
        return {}

    def precision(self) -> AbstractContextManager[object]:
        return nullcontext()

    def rest(self) -> None:
        """The root's weights, and with zero all, would stay gathered until a backward pass."""
        for module in self._model.modules():  # type: ignore[attr-defined]
            if isinstance(module, FSDPModule):
                module.reshard()

    def _shard(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Each block, then what is left; in this order of recomputing, compiling and sharding they fit together."""
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if self._bf16 else MixedPrecisionPolicy()
        parts = blocks(model)
        if self._recompute:
            checkpoint_activations(model)
        for part in parts or [model] if self._compile else ():
            part.compile()
        for part in parts:
            fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=self._reshards)
        self._model = fully_shard(model, mesh=mesh, mp_policy=policy)
        log.info("sharded over %d ranks: %d blocks and the rest", mesh.size(), len(parts))

    def _refuse(self, model: nn.Module) -> None:
        scalars = [name for name, parameter in model.named_parameters() if not parameter.ndim]
        if scalars:
            raise ConfigError(
                f"strategy.name: {listing(scalars, 3)} has no dimension to cut; give it the shape (1,), or use ddp"
            )
        shared = _across_blocks(model)
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


def _across_blocks(model: nn.Module) -> list[str]:
    """The names of parameters that a block has in common with another one, or with what is no block."""
    owners: dict[nn.Module, int] = {}
    for number, block in enumerate(blocks(model), 1):
        owners |= dict.fromkeys(block.modules(), number)
    users: dict[Tensor, set[int]] = defaultdict(set)
    names: dict[Tensor, str] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            users[parameter].add(owners.get(module, 0))
            names.setdefault(parameter, f"{path}.{name}")
    return [names[parameter] for parameter, found in users.items() if len(found) > 1]


def without_memory(make: ModelFactory) -> nn.Module:
    """``make()`` on the meta device; for real where its constructor needs the values of tensors."""
    try:
        with torch.device("meta"):
            model = make()
        stray = [name for module in model.modules() for name, value in vars(module).items() if _is_meta(value)]
        if not stray:
            return model
        reason = f"{listing(stray, 3)}: tensors that are neither parameters nor buffers"
    except Exception as error:  # whatever a model's constructor makes of tensors without values
        reason = f"{type(error).__name__}: {error}"
    log.warning("each rank makes the whole model in host memory first, for it cannot be made without (%s)", reason)
    return make()


def _is_meta(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_meta


@torch.no_grad()
def _scatter(whole: Mapping[str, Tensor], model: nn.Module, mesh: DeviceMesh) -> None:
    """Fill the parts of all ranks from rank 0's whole tensors; on the others only their shapes count."""
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), f"{name} was not sharded"
        source = whole[name]
        if mesh.get_rank():
            source = torch.empty(parameter.shape, dtype=parameter.dtype)
        part = distribute_tensor(source.to(mesh.device_type), mesh, parameter.placements)
        local(parameter).copy_(local(part))
