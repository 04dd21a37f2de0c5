"""The whole model on every rank: ddp, by torch's DistributedDataParallel, and models that send nothing.

Those are a replica between two meetings of local SGD, and nn.DataParallel.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from toolkit.base import logs
from toolkit.base.errors import ConfigError
from toolkit.devices import accelerator
from toolkit.ranks.batch import Share
from toolkit.ranks.collectives import broadcast_tensors
from toolkit.ranks.session import Session
from toolkit.strategies.layouts import Layout, autocast
from toolkit.strategies.models import checkpoint_activations
from toolkit.strategies.objective import TrialPass
from toolkit.strategies.priming import unused_message, without_gradient
from toolkit.strategies.protocol import ModelFactory

log = logs.get(__name__)


def use_channels_last(model: nn.Module) -> None:
    """Lay out ``model``'s parameters of four dimensions channels-last, and each such input when it arrives.

    Most convolutions for GPUs with tensor cores, and oneDNN's for CPUs, would convert each time. Checkpoints do not
    depend on it: tensors are written in the order of their dimensions.
    """
    model.to(memory_format=torch.channels_last)
    if not any(parameter.ndim == 4 for parameter in model.parameters()):
        log.warning("train.channels_last changes nothing: this model has no weights of four dimensions")
        return

    def lay_out(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        laid_out = []
        for value in inputs:
            is_image = isinstance(value, Tensor) and value.ndim == 4
            laid_out.append(value.contiguous(memory_format=torch.channels_last) if is_image else value)
        return tuple(laid_out)

    model.register_forward_pre_hook(lay_out)


#: No broadcast of buffers in every forward pass, see ``Update.equalise``. torch 2.15 renamed the option.
_KEEP_BUFFERS: dict[str, Any] = (
    {"forward_sync_buffers": False}
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else {"broadcast_buffers": False}
)


class Replicas(Layout):
    """See :class:`~.Layout`. DDP's hooks average in the backward pass; one rank has nothing to average, and no DDP.

    ``static_graph`` is not used: it is silently wrong for a model that leaves out layers.
    """

    passes_are_joint = False
    counts = True

    _model: nn.Module
    _passes: nn.Module  #: the model as passes call it: wrapped, or itself
    _parameters: list[nn.Parameter]

    def __init__(
        self,
        session: Session,
        *,
        precision: str,
        compile: bool,
        recompute: int,
        channels_last: bool = False,
        find_unused: bool = False,
    ) -> None:
        """Take how passes are made.

        With ``find_unused`` a parameter that no rank used in a step has a gradient of zero in it.
        """
        self.share = Share(session.rank, session.world_size)
        self._device = session.device
        self._precision = precision
        self._channels_last = channels_last
        self._compile = compile
        self._recompute = recompute
        self._find_unused = find_unused

    def place(self, make: ModelFactory, trial: TrialPass) -> nn.Module:
        model = self._made(make)
        self._passes = self._averaging(model) if self.share.count > 1 else model
        self._parameters = list(model.parameters())
        return model

    def _averaging(self, model: nn.Module) -> DistributedDataParallel:
        """Return DDP around ``model``, which gets rank 0's weights."""
        return DistributedDataParallel(
            model, gradient_as_bucket_view=True, find_unused_parameters=self._find_unused, **_KEEP_BUFFERS
        )

    def _made(self, make: ModelFactory) -> nn.Module:
        model = self._model = make().to(self._device)
        if self._channels_last:
            use_channels_last(model)
        if self._recompute:
            checkpoint_activations(model, self._recompute)
        if self._compile:
            model.compile()  # in place: the names in state() stay those of the model
        return model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._passes(*args, **kwargs)
        except RuntimeError as error:
            if "Expected to have finished reduction" not in str(error):
                raise
            raise ConfigError(
                "model: a parameter was used in an early part of the last step (train.accumulate) and not in its last "
                "one, whose pass sends gradients: ddp wants every parameter in every pass"
            ) from error

    def average(self) -> None:
        """Check that every parameter took part, or with ``find_unused`` give the others zeros.

        DDP complains only in the next step. Until then the weights would be those of this rank's gradients alone.
        """
        # A list that is kept: to walk through the modules takes longer than the check itself, in every step.
        unused = [parameter for parameter in self._parameters if parameter.grad is None and parameter.requires_grad]
        if not unused:
            return
        if not self._find_unused:
            raise ConfigError(unused_message(without_gradient(self._model)))
        for parameter in unused:
            parameter.grad = torch.zeros_like(parameter)

    def without_sync(self) -> AbstractContextManager[object]:
        passes = self._passes
        return passes.no_sync() if isinstance(passes, DistributedDataParallel) else nullcontext()

    def precision(self) -> AbstractContextManager[object]:
        return autocast(self._device, self._precision)


class LocalReplica(Replicas):
    """See :class:`~.Layout`. The first weights are rank 0's; gradients are each rank's own."""

    def __init__(
        self, session: Session, *, wrap: Callable[[nn.Module], nn.Module] = lambda model: model, **passes: Any
    ) -> None:
        """Take a wrapper for the model; ``passes`` says how passes are made, see Replicas."""
        super().__init__(session, **passes)
        self._wrap = wrap

    def place(self, make: ModelFactory, trial: TrialPass) -> nn.Module:
        model = self._made(make)
        # DDP would broadcast the first weights; without it nothing else does.
        broadcast_tensors(model.parameters(), source=0)
        self._passes = self._wrap(model)
        return model

    def average(self) -> None:
        """Do nothing: no gradient is averaged."""


def data_parallel(session: Session, *, precision: str, compile: bool, recompute: int) -> LocalReplica:
    """Return the layout of ``nn.DataParallel``: a process gives each of its GPUs a part of every batch.

    Raises ConfigError for several ranks, and for settings that do not work on its copies of the model.
    """
    if session.world_size > 1:
        raise ConfigError(
            f"strategy.name: dp is one process with all GPUs of a node, and there are {session.world_size} ranks; use "
            "ddp, or set cluster.nodes and cluster.tasks_per_node to 1"
        )
    for key, is_set in (("train.compile", compile), ("strategy.activation_checkpointing", recompute)):
        if is_set:
            raise ConfigError(f"{key}: dp copies the model in every step, which this does not survive; use ddp")
    gpus = accelerator.count() if session.device.type != "cpu" else 0
    log.info(
        "dp: a batch is shared by %s of this process, its weights copied and its outputs gathered in every step; "
        "ddp with a rank for each GPU does neither, is faster and goes over several nodes",
        f"the {gpus} GPUs" if gpus > 1 else f"the only {'GPU' if gpus else 'processor'}",
    )
    return LocalReplica(session, precision=precision, compile=False, recompute=0, wrap=nn.DataParallel)
