"""What a script's models and optimizers have beside their ``state_dict()``, and how they are without wrappers.

Scripts freeze and unfreeze layers at steps that a resume has passed already (:class:`Frozen`). Models change tensors as
they train that no ``state_dict()`` has (:class:`Unsaved`). Gradients may wait for an optimizer's step
(:class:`Accumulation`).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from toolkit.base import logs
from toolkit.base.errors import ConfigError, listing
from toolkit.checkpoint.tensors import to_bytes
from toolkit.ranks.state import Entry, Json, Replicated
from toolkit.strategies.optimizer_state import refuse_lost_state

log = logs.get(__name__)

FROZEN = "update/frozen"


class Frozen:
    """The parameters without gradients: when a loop hands its models over, and now."""

    def __init__(self, parameters: Mapping[Tensor, str], modules: list[nn.Module]) -> None:
        """``parameters`` have names; ``modules`` are as they were handed over, in their wrappers."""
        self._parameters = parameters
        parts = [part for module in modules for part in module.modules()]
        self._in_ddp = {p for part in parts if isinstance(part, DistributedDataParallel) for p in part.parameters()}
        self._first = self._now()

    def entries(self) -> dict[str, Entry]:
        """Return what a checkpoint holds."""
        return {FROZEN: Replicated({"first": self._first, "now": self._now()})} if self._parameters else {}

    def on_loaded(self, values: Mapping[str, Json]) -> None:
        """Freeze and unfreeze as at the save. A script that now begins with other parameters frozen is left alone.

        Raises ConfigError for those that DDP was made without: their gradients would stay on each rank.
        """
        saved: Any = values.get(FROZEN)
        if saved is None or saved["first"] != self._first:
            return
        now = set(saved["now"])
        thawed = set(self._first) - now
        missed = [name for parameter, name in self._parameters.items() if parameter in self._in_ddp and name in thawed]
        if missed:
            raise ConfigError(
                f"run.resumable: {listing(missed, 3)} are trained since a later step, and DistributedDataParallel was "
                "made while they were frozen: hand over the model itself, and wrap it after run.resumable"
            )
        for parameter, name in self._parameters.items():
            parameter.requires_grad_(name not in now)

    def _now(self) -> list[str]:
        return [name for parameter, name in self._parameters.items() if not parameter.requires_grad]


#: After so many steps of the loop without a first one of an optimizer it is saved all the same.
MAX_OPEN_STEPS = 64
#: Larger tensors are not looked at: a digest takes a second for each GiB.
MAX_BYTES = 64 << 20


class Unsaved:
    """The plain attributes and buffers of modules that no checkpoint holds, as they were when this was made.

    What is not state is left out: a tensor that is made or grows at the first batch is a cache, and one with a gradient
    is an output that the module keeps. So are sparse and quantized tensors, and very large ones, which would take time.
    """

    def __init__(self, modules: Mapping[str, nn.Module], handed_over: Iterable[object]) -> None:
        """``modules`` have the prefixes of their names in a checkpoint. What is in ``handed_over`` is saved."""
        self._parts = [
            (f"{prefix}{path}." if path else prefix, part)
            for prefix, module in modules.items()
            for path, part in module.named_modules()
            # Torch's own modules keep no state there, and what a module saves by methods of its own is not known.
            if not type(part).__module__.startswith("torch.") and not _saves_by_itself(part)
        ]
        self._saved = {id(value) for value in handed_over}
        self._first = {name: _digest(tensor) for name, tensor in self._now()}

    def changed(self) -> list[str]:
        """Return the names of those of the same shape and type with another content than at first."""
        now = {name: _digest(tensor) for name, tensor in self._now()}
        return [
            name
            for name, digest in self._first.items()
            if name in now and now[name] != digest and now[name][:2] == digest[:2]
        ]

    def _now(self) -> Iterator[tuple[str, Tensor]]:
        for place, part in self._parts:
            buffers = {name: part._buffers.get(name) for name in part._non_persistent_buffers_set}
            for name, value in {**vars(part), **buffers}.items():
                if type(value) is Tensor and _is_small_and_dense(value) and id(value) not in self._saved:
                    yield f"{place}{name}", value


def _is_small_and_dense(tensor: Tensor) -> bool:
    is_dense = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta
    return is_dense and not tensor.requires_grad and tensor.nbytes <= MAX_BYTES


def _digest(tensor: Tensor) -> tuple[object, ...]:
    return (tensor.shape, tensor.dtype, zlib.crc32(to_bytes("an attribute", tensor)))


def _saves_by_itself(part: nn.Module) -> bool:
    kind = type(part)
    return any(
        getattr(kind, name) is not getattr(nn.Module, name)
        for name in ("get_extra_state", "_save_to_state_dict", "state_dict")
    )


def bare(module: nn.Module) -> nn.Module:
    """Return the module within DDP, DataParallel, torch.compile and Fabric, whose names are the model's own."""
    return [*wrapper_chain(module)][-1]


def wrapper_chain(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module, and those within it down to :func:`bare`."""
    while True:
        yield module
        if isinstance(module, (DistributedDataParallel, nn.DataParallel)):
            module = module.module
        elif type(module).__name__ == "OptimizedModule":  # by name: importing torch's compiler takes a second
            module = module._orig_mod  # type: ignore[assignment]
        elif type(module).__name__ == "_FabricModule":
            module = module._forward_module  # type: ignore[assignment]
        else:
            return


class PassCounter:
    """A forward pre-hook that calls ``note``, unless it is being compiled: each count would compile the model anew."""

    def __init__(self, note: Callable[[], object]) -> None:
        self._note = note

    def __call__(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self._note()

    def __deepcopy__(self, memo: object) -> PassCounter:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # A model that is saved whole may be loaded without the toolkit: `dict.get` gives its inputs back as they are.
        return getattr, ({}, "get")


def is_metric(module: nn.Module) -> bool:
    """True for a metric of torchmetrics: a module whose state is each rank's own, and in no ``state_dict`` unasked."""
    return any(kind.__module__.startswith("torchmetrics") for kind in type(module).__mro__)


def bare_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer within accelerate's or Fabric's wrapper.

    Raises ConfigError for others with a state that would be lost, and for torch's ZeroRedundancyOptimizer.
    """
    if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
        raise ConfigError(
            "run.resumable: ZeroRedundancyOptimizer keeps parts of its state on each rank, under numbers that change "
            "with their count; shard with torch.distributed.fsdp.fully_shard instead"
        )
    # Without a state of their own. By name: neither library need be installed.
    if not {"AcceleratedOptimizer", "_FabricOptimizer"}.isdisjoint(kind.__name__ for kind in type(optimizer).__mro__):
        return bare_optimizer(optimizer.optimizer)  # type: ignore[attr-defined]
    refuse_lost_state(optimizer, "run.resumable")
    return optimizer


class Accumulation:
    """Counts a loop's steps since those of each optimizer, which its hook tells.

    Gradients do not decide whether a loop is saved: where a rank has none for a layer, the ranks would not agree.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._since = dict.fromkeys(optimizers, 0)  #: steps of the loop that have ended since the optimizer's last
        self._interval = 0  #: the most steps of the loop that an optimizer's step was waited for
        self._has_warned = False
        for optimizer in optimizers:
            optimizer.register_step_post_hook(self._note_step)

    def end_step(self) -> None:
        """Note the end of a step of the loop."""
        for optimizer in self._since:
            self._since[optimizer] += 1

    @property
    def waited(self) -> int:
        """The steps of the loop since any optimizer's last one."""
        return min(self._since.values(), default=0)

    @property
    def is_open(self) -> bool:
        """True if the next step of an optimizer is to be waited for. After a long time without it none is expected."""
        return 0 < self.waited < (2 * self._interval or MAX_OPEN_STEPS)

    def warn_of_idle(self, step: int) -> None:
        """Warn once, where the loop is saved at ``step``, that no optimizer made a step in its last one."""
        if self.waited and not self._has_warned:
            self._has_warned = True
            log.warning(
                "step %d is saved, and no optimizer of run.resumable has made a step since step %d: if the loop has "
                "replaced it, a resume has the old one. Keep one optimizer: give it groups by add_param_group, and set "
                "their rates",
                step,
                step - self.waited,
            )

    def may_hold_gradients(self, optimizer: Optimizer) -> bool:
        """True if ``optimizer`` made no step in the loop's last one: its gradients may be those of several batches."""
        return self._since[optimizer] > 0

    def _note_step(self, optimizer: Optimizer, *_: object) -> None:
        self._interval = max(self._interval, self.waited + 1)
        self._since[optimizer] = -1  # the step of the loop has not ended yet
