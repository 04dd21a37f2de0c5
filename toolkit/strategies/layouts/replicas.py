"""ddp: the whole model on every rank, with gradients averaged by torch's DistributedDataParallel."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from toolkit.base.errors import ConfigError
from toolkit.ranks.batch import Share
from toolkit.ranks.session import Session
from toolkit.strategies.blocks import checkpoint_activations
from toolkit.strategies.layouts import Layout, autocast
from toolkit.strategies.layouts.memory_format import use_channels_last
from toolkit.strategies.objective import TrialPass
from toolkit.strategies.priming import unused_message, without_gradient
from toolkit.strategies.protocol import ModelFactory

#: No broadcast of buffers in every forward pass, see ``Update.equalise``. torch 2.15 renamed the option.
_KEEP_BUFFERS: dict[str, Any] = (
    {"forward_sync_buffers": False}
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else {"broadcast_buffers": False}
)


class Replicas(Layout):
    """See :class:`~.Layout`. DDP's hooks average in the backward pass.

    ``static_graph`` is not used: it is silently wrong for a model that leaves out layers.
    """

    passes_are_joint = False
    counts = True

    _ddp: DistributedDataParallel
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
        # DDP also broadcasts rank 0's weights to the other ranks.
        self._ddp = DistributedDataParallel(
            model, gradient_as_bucket_view=True, find_unused_parameters=self._find_unused, **_KEEP_BUFFERS
        )
        self._parameters = list(model.parameters())
        return model

    def _made(self, make: ModelFactory) -> nn.Module:
        model = make().to(self._device)
        if self._channels_last:
            use_channels_last(model)
        if self._recompute:
            checkpoint_activations(model, self._recompute)
        if self._compile:
            model.compile()  # in place: the names in state() stay those of the model
        return model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._ddp(*args, **kwargs)
        except RuntimeError as error:
            if "Expected to have finished reduction" not in str(error):
                raise
            raise ConfigError(
                "model: a parameter was used in an early part of the last step (train.accumulate) and not in its last "
                "one, whose pass sends gradients: ddp wants every parameter in every pass"
            ) from error

    def average(self) -> None:
        """Check that every parameter took part: then the backward pass has averaged all gradients.

        With ``find_unused`` unused ones get zeros instead. DDP itself complains only in the next step, if there is one.
        Until then the weights would be those of this rank's gradients alone.
        """
        # A list that is kept: to walk through the modules takes longer than the check itself, in every step.
        unused = [parameter for parameter in self._parameters if parameter.grad is None and parameter.requires_grad]
        if not unused:
            return
        if not self._find_unused:
            raise ConfigError(unused_message(without_gradient(self._ddp.module)))
        for parameter in unused:
            parameter.grad = torch.zeros_like(parameter)

    def without_sync(self) -> AbstractContextManager[object]:
        return self._ddp.no_sync()

    def precision(self) -> AbstractContextManager[object]:
        return autocast(self._device, self._precision)
