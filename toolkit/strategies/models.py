"""What strategies do with any model's modules: blocks, modes, BatchNorm over ranks, extra state."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.utils.checkpoint import checkpoint

from toolkit.base import logs
from toolkit.base.errors import ConfigError, listing
from toolkit.config import StrategyConfig
from toolkit.ranks.collectives import broadcast_object, sum_across_ranks
from toolkit.ranks.state import Entry, Json, Replicated, local
from toolkit.strategies.priming import has_extra_state
from toolkit.strategies.protocol import ModelFactory

log = logs.get(__name__)

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of ``model``, in order.

    A block is an outermost module of which a list or sequence holds several of one class. A single layer (Linear) is
    not a block, however often it occurs.
    """
    found: list[nn.Module] = []
    kinds = Counter(type(child) for child in model.children()) if isinstance(model, _CONTAINERS) else Counter()
    for child in model.children():
        # Repeated in a container, with children and parameters of its own.
        is_block = (
            kinds[type(child)] > 1 and any(True for _ in child.children()) and any(True for _ in child.parameters())
        )
        found += [child] if is_block else blocks(child)
    return found


def recompute_interval(config: StrategyConfig) -> int:
    """Return n if one of n blocks is to compute its activations again. 0: no block is."""
    return config.activation_checkpointing_every if config.activation_checkpointing else 0


def checkpoint_activations(model: nn.Module, every: int = 1) -> None:
    """Let blocks keep only their inputs for the backward pass, which computes the rest again. Names stay.

    Of ``every`` blocks in a row the last one does so. Raises ConfigError if there is no block, or if a second pass
    would change more than it computes.
    """
    parts = blocks(model)
    if not parts:
        raise ConfigError(
            "strategy.activation_checkpointing: this model repeats no block (several modules of one class in a "
            "ModuleList or Sequential) whose activations could be recomputed; set it to false"
        )
    # A recomputed forward pass updates running statistics a second time.
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.track_running_stats:
            raise ConfigError(
                f"strategy.activation_checkpointing: {name} would count each batch twice in its running statistics; "
                "set it to false, or use a model without BatchNorm"
            )
    if every > len(parts):
        raise ConfigError(
            f"strategy.activation_checkpointing_every: this model has {len(parts)} blocks, fewer than {every}; use a "
            "smaller number, or set strategy.activation_checkpointing to false"
        )
    for part in parts[every - 1 :: every]:
        part.forward = partial(checkpoint, part.forward, use_reentrant=False)


def to_training_mode(model: nn.Module) -> nn.Module:
    """Return ``model`` in training mode. Modules that its factory left in evaluation mode stay in it.

    A model that is in evaluation mode as a whole, as some libraries return them, goes into training mode as a whole.
    """
    if not model.training:
        model.train()
    frozen = [name for name, module in model.named_modules() if not module.training]
    if frozen:
        log.info("in evaluation mode while training, as the model was made: %s", listing(frozen, 5))
    return model


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put ``model`` into evaluation mode; afterwards each module returns to its mode: what a job has frozen stays."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def batchnorm_buffers(model: nn.Module) -> list[Tensor]:
    """Return the running means and variances in ``model``, which follow the samples of each rank."""
    norms = [module for module in model.modules() if isinstance(module, _NormBase)]
    return [value for norm in norms for value in (norm.running_mean, norm.running_var) if value is not None]


def synchronised(make: ModelFactory) -> ModelFactory:
    """Return a factory like ``make``, with BatchNorm layers that train on all ranks' samples."""

    def make_synchronised() -> nn.Module:
        model = make()
        norms = [module for module in model.modules() if type(module) in _KINDS]
        for norm in norms:
            norm.__class__ = SyncBatchNorm  # in place: names, hooks and modes stay
        if not norms:
            log.warning("train.sync_batch_norm changes nothing: this model has no BatchNorm of torch's")
        return model

    return make_synchronised


_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class SyncBatchNorm(_BatchNorm):
    """BatchNorm over a batch (n, c, ...) that ranks share in parts of any size.

    It does what torch.nn.SyncBatchNorm does, which is for GPUs only. Each forward and backward pass is one small
    collective.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        """Accept any shape. The original layer has its own shapes, which torch checks in evaluation mode."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        # Statistics of half-precision values are computed in fp32 and summed in fp64.
        values = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        dims = [0, *range(2, values.dim())]
        count = torch.full((1,), values.numel() // values.shape[1], dtype=torch.float64, device=values.device)
        var, mean = torch.var_mean(values, dims, correction=0)
        var, mean = var.double(), mean.double()
        # One message: count, sums and sums of squares. Ranks may have different numbers of samples.
        sums: Tensor = _Sum.apply(torch.cat([count, count * mean, count * (var + mean.square())]))
        count, mean, square = sums[0], *sums[1:].view(2, -1)
        mean, square = mean / count, square / count
        var = square - mean.square()
        # The running variance is the unbiased one, as torch has it.
        self._follow(mean.detach(), (var * count / (count - 1).clamp(min=1)).detach())
        shape = [1, -1, *[1] * (values.dim() - 2)]
        scale = (var + self.eps).rsqrt()
        if self.weight is not None:
            scale = self.weight * scale
        shift = -mean * scale if self.bias is None else self.bias - mean * scale
        scale, shift = (each.to(values.dtype).view(shape) for each in (scale, shift))
        normed: Tensor = values * scale + shift
        return normed.to(input.dtype)

    @torch.no_grad()
    def _follow(self, mean: Tensor, var: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        part = self.momentum if self.momentum is not None else 1 / self.num_batches_tracked.double()
        for running, now in ((self.running_mean, mean), (self.running_var, var)):
            running.copy_(running.double() * (1 - part) + now * part)


class _Sum(torch.autograd.Function):
    """The sum over all ranks. The gradient of each rank's loss for it is summed over all ranks as well."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return sum_across_ranks(values.clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return sum_across_ranks(gradient.clone())


SUFFIX = "_extra_state"  #: torch's suffix in a state_dict


def modules_with_extra_state(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules with a ``get_extra_state``, by the state's name in the ``state_dict``."""
    named = ((name, module) for name, module in model.named_modules() if has_extra_state(module))
    return {f"{name}.{SUFFIX}" if name else SUFFIX: module for name, module in named}


class ExtraState:
    """Extra state as ``model/<module>._extra_state``, with ``prefix`` for ``model/``. As with buffers, rank 0's counts.

    Raises ConfigError for extra state that a checkpoint cannot hold. It must be a tensor, or a value that a round trip
    through JSON leaves equal.
    """

    def __init__(self, model: nn.Module, prefix: str = "model/") -> None:
        self._modules = {f"{prefix}{name}": module for name, module in modules_with_extra_state(model).items()}
        self._tensors: dict[str, Tensor] = {}
        strange = [name for name, module in self._modules.items() if not _can_be_stored(module.get_extra_state())]
        if strange:
            raise ConfigError(
                f"model: {listing(strange, 3)}: get_extra_state() returns something else than a tensor, or than "
                "numbers, texts, lists and dictionaries by text; a checkpoint unpickles nothing, and cannot hold it"
            )

    def entries(self) -> dict[str, Entry]:
        """Return what a checkpoint stores, equal on all ranks from now on. A collective if there is any extra state."""
        if not self._modules:
            return {}
        values = broadcast_object(0, {name: module.get_extra_state() for name, module in self._modules.items()})
        # Other ranks take rank 0's values, so that all declare equal ones.
        if dist.get_rank():
            for name, value in values.items():
                self._modules[name].set_extra_state(value)
        return self._declared(values)

    def places(self) -> dict[str, Entry]:
        """Return what a checkpoint is read into; not a collective."""
        return self._declared({name: module.get_extra_state() for name, module in self._modules.items()})

    def _declared(self, values: Mapping[str, Any]) -> dict[str, Entry]:
        self._tensors = {name: value.detach() for name, value in values.items() if isinstance(value, Tensor)}
        return {name: Replicated(self._tensors.get(name, value)) for name, value in values.items()}

    def on_loaded(self, values: Mapping[str, Json]) -> None:
        """Hand each module its extra state. It is an entry of ``values``, or a filled tensor of :meth:`entries`."""
        for name, module in self._modules.items():
            module.set_extra_state(self._tensors[name] if name in self._tensors else values[name])


def refuse_extra_state(model: nn.Module, strategy: str) -> None:
    """Raise ConfigError if ``model`` has extra state, for a strategy whose ranks cannot keep it."""
    if found := modules_with_extra_state(model):
        raise ConfigError(
            f"strategy.name: {listing(list(found), 3)} is kept next to tensors (get_extra_state), and {strategy} does "
            "not save it; make it a buffer, or use ddp"
        )


def _can_be_stored(value: Any) -> bool:
    # The value must survive JSON unchanged: a tuple, say, would come back as a list.
    try:
        return isinstance(value, Tensor) or json.loads(json.dumps(value, allow_nan=False)) == value
    except (TypeError, ValueError):
        return False


def refuse_copies(where: str, module: nn.Module) -> None:
    """Raise ConfigError, beginning with ``where``, if the ``state_dict`` has copies of weights or buffers."""
    if type(module).__name__ == "FullyShardedDataParallel":
        raise ConfigError(
            f"{where} is sharded by FullyShardedDataParallel, whose state_dict() has copies; shard with "
            "torch.distributed.fsdp.fully_shard instead"
        )
    state = {key: value for key, value in module.state_dict().items() if isinstance(value, Tensor)}
    stored = {_memory_of(value) for value in state.values()}
    # Frozen weights come from elsewhere: quantized ones, for example, are stored in a form of their own.
    trained = {key: parameter for key, parameter in module.named_parameters() if parameter.requires_grad}
    saved = {key: buffer for key, buffer in module.named_buffers() if key in state}
    for key, tensor in (trained | saved).items():
        if tensor.numel() and _memory_of(tensor) not in stored:
            raise ConfigError(
                f"{where}: its state_dict() has a copy of {key}, or lacks it, and filling that from a checkpoint would "
                "change nothing; have state_dict() return the tensor itself"
            )


def _memory_of(tensor: Tensor) -> int:
    try:
        return local(tensor).untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a kind of tensor that is made of others
        return 0
