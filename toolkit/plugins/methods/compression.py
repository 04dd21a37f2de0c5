"""Chooses the layout of ddp with ``strategy.compression``, and has the one that sends during the backward pass.

That one is for fp16 and bf16 over NCCL; all else is sent after it, see :mod:`.compressed`.

DDP calls a hook for each bucket whose gradients are complete, in the same order on every rank. The hook only enqueues:
on a stream of its own the GPU encodes the bucket, sends it, and decodes the mean, and the backward pass goes on beside
it. torch's own hooks for these types add up in half precision, which rounds at every rank. Here each value is rounded
once on its way to the sum and once on its way back, as everywhere else (see
:class:`~toolkit.plugins.methods.compression_schemes.Blocks`).

Schemes that keep something for the next step are not sent this way: what they keep would belong to DDP's buckets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from toolkit.config import StrategyConfig, TrainConfig
from toolkit.config.strategy import STATELESS
from toolkit.devices.accelerator import with_streams
from toolkit.devices.kinds import is_of_devices
from toolkit.plugins.methods.compressed import Compressed, refuse_types
from toolkit.plugins.methods.compression_schemes import Scheme, Wire, build_scheme
from toolkit.ranks.session import Session
from toolkit.strategies.layouts import Layout
from toolkit.strategies.layouts.replicas import Replicas
from toolkit.strategies.objective import TrialPass
from toolkit.strategies.protocol import ModelFactory


class Overlapped(Replicas):
    """See :class:`~toolkit.strategies.layouts.Layout`."""

    def __init__(self, session: Session, *, compression: str, **passes: Any) -> None:
        """Take the kind of compression; ``passes`` says how passes are made, see Replicas."""
        super().__init__(session, **passes)
        self._compression = compression
        self._wire = Wire()

    def place(self, make: ModelFactory, trial: TrialPass) -> nn.Module:
        """Make the model, and have its gradients sent by hooks. Raises ConfigError for a type that would be rounded."""
        model = super().place(make, trial)
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        refuse_types(trained)
        self._plain_bytes = sum(self._wire.cost_of_sum(parameter.detach().float()) for parameter in trained.values())
        return model

    def _averaging(self, model: nn.Module) -> DistributedDataParallel:
        ddp = super()._averaging(model)
        scheme = build_scheme(self._compression, [], self._wire, self._device)
        sender = _BucketHook(scheme, self._wire, self._device)  # without this layout, which DDP would keep alive
        ddp.register_comm_hook(None, lambda state, bucket: sender.send(bucket))
        return ddp

    def figures(self) -> Mapping[str, float]:
        """Return the bytes that this rank sends in a step, and would send without compression."""
        return {"compression/sent_bytes": self._wire.sent_bytes, "compression/plain_bytes": self._plain_bytes}


class _BucketHook:
    """DDP's hook. It keeps nothing from one step to the next."""

    def __init__(self, scheme: Scheme, wire: Wire, device: torch.device) -> None:
        self._scheme, self._wire, self._device = scheme, wire, device
        self._module = with_streams(device)
        self._stream = None if self._module is None else self._module.Stream(device)

    def send(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Replace the bucket's gradients by their means over the ranks. Return a future of them.

        On the CPU they are there when the call returns.
        """
        if not bucket.index():  # the first of a step
            self._wire.sent_bytes = 0.0
        gradients = bucket.buffer()
        sent: Future[Tensor] = Future(devices=[] if self._stream is None else [self._device])
        with self._beside():
            size = len(gradients)
            values = torch.zeros(size + -size % self._scheme.multiple, device=self._device)
            values[:size].copy_(gradients)
            gradients.copy_(self._scheme.exchange(values)[:size])
            sent.set_result(gradients)  # DDP's streams will wait for what is enqueued here by now
        return sent

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Enqueue on the stream for sending, behind what has computed the gradients."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream):
            yield


def build(config: StrategyConfig, session: Session, train: TrainConfig, how: dict[str, Any]) -> Layout:
    """Return the layout. ``how`` is what all layouts take."""
    # NCCL's collectives are only enqueued. What keeps nothing for the next step is sent during the backward pass then.
    # One rank has no DDP, whose hooks would do that.
    keeps_nothing = config.compression in STATELESS and not config.compression_layers
    if session.world_size > 1 and keeps_nothing and is_of_devices(dist.get_backend()):
        how |= {"channels_last": train.channels_last, "find_unused": config.find_unused}
        return Overlapped(session, compression=config.compression, **how)
    return Compressed(session, config=config, channels_last=train.channels_last, **how)
