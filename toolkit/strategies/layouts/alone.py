"""A model that sends nothing: a replica between two meetings of local SGD, or nn.DataParallel."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from toolkit.base import logs
from toolkit.base.errors import ConfigError
from toolkit.ranks.collectives import broadcast_tensors
from toolkit.ranks.session import Session
from toolkit.strategies.layouts.replicas import Replicas
from toolkit.strategies.objective import TrialPass
from toolkit.strategies.protocol import ModelFactory

log = logs.get(__name__)


class LocalReplica(Replicas):
    """See :class:`~.Layout`. The first weights are rank 0's; gradients are each rank's own."""

    _passes: nn.Module  #: the model as passes call it: wrapped, or itself

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

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._passes(*args, **kwargs)

    def without_sync(self) -> AbstractContextManager[object]:
        return nullcontext()

    def average(self) -> None:
        """Do nothing: no gradient is averaged."""


def data_parallel(session: Session, *, precision: str, compile: bool, recompute: int) -> LocalReplica:
    """Return the layout of ``nn.DataParallel``. One process gives each of its GPUs a part of every batch.

    Each GPU has a thread. Raises ConfigError for several ranks, and for settings that do not work on the copies that it
    makes of the model.
    """
    if session.world_size > 1:
        raise ConfigError(
            f"strategy.name: dp is one process with all GPUs of a node, and there are {session.world_size} ranks; use "
            "ddp, or set cluster.nodes and cluster.tasks_per_node to 1"
        )
    for key, is_set in (("train.compile", compile), ("strategy.activation_checkpointing", recompute)):
        if is_set:
            raise ConfigError(f"{key}: dp copies the model in every step, which this does not survive; use ddp")
    gpus = torch.cuda.device_count() if session.device.type == "cuda" else 0
    log.info(
        "dp: a batch is shared by %s of this process, its weights copied and its outputs gathered in every step; "
        "ddp with a rank for each GPU does neither, is faster and goes over several nodes",
        f"the {gpus} GPUs" if gpus > 1 else f"the only {'GPU' if gpus else 'processor'}",
    )
    return LocalReplica(session, precision=precision, compile=False, recompute=0, wrap=nn.DataParallel)
