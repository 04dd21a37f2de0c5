"""ddp over a slow link: gradients are compressed before they are sent.

All gradients are complete when the first one is sent, so the order of the collectives is fixed on every rank. DDP's
hooks would start them as gradients become ready, and torch's hook for PowerSGD hangs on gloo if there are several
buckets. The communication that DDP hides behind the backward pass is waited for instead: where compression pays, little
of it was hidden.

Over NCCL, fp16 and bf16, which keep nothing for the next step, are sent by a hook for each of DDP's buckets
(:class:`Overlapped`). It only enqueues, on a separate stream. torch's hooks for these types add up in half precision,
which rounds at every rank. Here each value is rounded once on its way to the sum and once on its way back.
"""

from __future__ import annotations

import fnmatch
import time
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from toolkit.base import logs
from toolkit.base.errors import ConfigError, listing
from toolkit.config import StrategyConfig, TrainConfig
from toolkit.config.strategy import STATELESS
from toolkit.devices.accelerator import with_streams
from toolkit.devices.kinds import is_of_devices
from toolkit.metrics.meters import stopwatch
from toolkit.plugins.methods.compression_schemes import MeteredCollectives, Piece, Scheme, amount_for, build_scheme
from toolkit.ranks.collectives import sum_across_ranks
from toolkit.ranks.session import Session
from toolkit.ranks.state import Entry, PerRank
from toolkit.strategies.layouts import Layout, LocalReplica, Replicas
from toolkit.strategies.objective import TrialPass
from toolkit.strategies.protocol import ModelFactory

TYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Sizes in bytes of two all-reduces, which tell a link's latency from its bandwidth.
PROBES = (1 << 12, 1 << 22)

log = logs.get(__name__)


class Compressed(LocalReplica):
    """See :class:`~toolkit.strategies.layouts.Layout`."""

    _model: nn.Module

    def __init__(self, session: Session, *, config: StrategyConfig, **passes: Any) -> None:
        """Take the strategy's config; ``passes`` says how passes are made, see Replicas."""
        super().__init__(session, **passes)
        self._config = config
        self._says = session.is_main
        self._watch = stopwatch(session.device)
        self._windows = 0  #: calls of figures(); priming is in the first window
        self._error: Tensor | None = None  #: of the first step of a window

    def place(self, make: ModelFactory, trial: TrialPass) -> nn.Module:
        """Raises ConfigError for parameters that cannot be compressed, and a pattern that matches no parameter."""
        self._model = super().place(make, trial)
        self._wire = MeteredCollectives()
        # The vector: what is compressed, padding to the scheme's multiple, then what is sent uncompressed.
        self._sort()
        self._scheme = build_scheme(self._config.compression, self._pieces, self._wire, self._device)
        self._length = sum(piece.numel for piece in self._pieces)
        self._padding = torch.zeros(-self._length % self._scheme.multiple, device=self._device)
        self._length += len(self._padding)
        self._whole = _pieces(self._plain, {}, start=self._length)
        size = self._length + sum(piece.numel for piece in self._whole)
        self._vector = torch.empty(size, device=self._device)  # new memory in each step would cost a third of it
        self._residual = torch.zeros(self._length if self._scheme.feeds_back else 0, device=self._device)
        self._decay = self._config.compression_average
        self._moving = torch.zeros(0 if self._decay is None else size, device=self._device)
        # For the log: what a plain all-reduce would send, and how long it would take on this link.
        self._plain_bytes = sum(self._wire.cost_of_sum(p.detach().float()) for p in self._all())
        self._plain_s = _all_reduce_s(self._device, self._plain_bytes)
        return self._model

    @torch.no_grad()
    def average(self) -> None:
        # Parameters that this rank's pass did not use get zeros, but for priming, which reports them.
        missing = [p for p in self._all() if p.grad is None]
        if missing and not self._windows:
            return
        for parameter in missing:
            parameter.grad = torch.zeros_like(parameter)
        self._watch.start()
        self._wire.sent_bytes = 0.0
        gradients = [*_flat(self._packed.values()), self._padding, *_flat(self._plain.values())]
        # All gradients in one vector, in fp32; the two parts are views of it.
        own = torch.cat(gradients, out=self._vector)
        packed, plain = own[: self._length], own[self._length :]
        length = packed.norm() if self._error is None else None
        # The moving average takes the gradients' place. It is kept below only if the means are finite.
        moving = None if self._decay is None else own.lerp_(self._moving, self._decay).clone()
        # What is not compressed is summed meanwhile.
        summing = self._wire.start_sum(plain) if self._plain else None
        if self._scheme.feeds_back:
            packed += self._residual
        mean = self._scheme.average(packed) if self._packed else packed
        # No residual keeps a gradient that is not finite, on any rank: it would come back in every later step.
        if self._scheme.feeds_back:
            _keep(self._residual, packed, mean.sum().isfinite())
        if length is not None:
            self._error = packed.norm() / length.clamp(min=1e-30)
        if summing is not None:
            summing.wait()
        _give_back(self._packed.values(), mean)
        _give_back(self._plain.values(), plain / self._wire.ranks)
        if moving is not None:
            _keep(self._moving, moving, (mean.sum() + plain.sum()).isfinite())
        self._watch.stop()

    def state(self) -> dict[str, Entry]:
        """Return ``residual/rank3/<parameter>``, ``moving/rank3/<parameter>`` and the scheme's own state."""
        entries: dict[str, Entry] = {}
        everything = [*self._pieces, *self._whole]
        for kind, vector, pieces in (("residual", self._residual, self._pieces), ("moving", self._moving, everything)):
            for piece in pieces if len(vector) else ():
                value = piece.of(vector).view(piece.shape)
                entries[f"{kind}/rank{self.share.index}/{piece.name}"] = PerRank(value, averages=True)
        return entries | self._scheme.state()

    def step_metrics(self) -> dict[str, float]:
        """Return the bytes, the error and the time of compression, and a plain all-reduce's.

        Bytes: what this rank sends in a step and would send without compression. Error: how much of a gradient the
        first step of the window left for later, or lost, relative to the gradient. Time: how long compressing and
        sending took, and how long a plain all-reduce of the gradients would take, by the link's speed as measured at
        the start.
        """
        found = {
            "compression/sent_bytes": self._wire.sent_bytes,
            "compression/plain_bytes": self._plain_bytes,
            "compression/error": 0.0 if self._error is None else float(self._error),
            "compression/time_s": self._watch.take(),
            "compression/plain_time_s": self._plain_s,
        }
        self._error = None
        self._windows += 1
        # The first window has priming in it, so the second one is judged.
        if self._windows == 2 and self._says:
            took = found["compression/time_s"]
            log.info(
                "strategy.compression: %s sends %.3g MB a step instead of %.3g and takes %.3g s, where a plain "
                "all-reduce would take about %.3g s on this link: %s",
                self._config.compression,
                self._wire.sent_bytes / 1e6,
                self._plain_bytes / 1e6,
                took,
                self._plain_s,
                "worth it" if took < self._plain_s else "not worth it; set it to none",
            )
        return found

    def _sort(self) -> None:
        """Sort parameters into compressed ones, with their places in the vector, and uncompressed ones."""
        named = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        refuse_types(named)
        # The last pattern of compression_layers that matches a parameter counts.
        values: dict[str, float | str] = {}
        for pattern, value in self._config.compression_layers.items():
            matching = fnmatch.filter(named, pattern)
            if not matching:
                raise ConfigError(
                    f"strategy.compression_layers: {pattern!r} matches no parameter; there are: "
                    f"{listing(list(named), 12)}"
                )
            values |= dict.fromkeys(matching, value)
        amounts = {name: amount_for(self._config, p.shape, values.get(name)) for name, p in named.items()}
        self._packed = {name: p for name, p in named.items() if amounts[name] is not None}
        self._plain = {name: p for name, p in named.items() if amounts[name] is None}
        self._pieces = _pieces(self._packed, amounts, start=0)
        # top-k sends places as int32.
        size = sum(piece.numel for piece in self._pieces)
        if size >= 2**31:
            raise ConfigError(f"strategy.compression: {size} values are more than 2**31, which places are sent for")
        counts = len(self._packed), len(self._plain)
        log.info("%s: %d parameters compressed, %d sent as they are", self._config.compression, *counts)

    def _all(self) -> list[nn.Parameter]:
        return [*self._packed.values(), *self._plain.values()]


def refuse_types(named: Mapping[str, nn.Parameter]) -> None:
    """Raise ConfigError for parameters of a type that fp32 would round."""
    strange = [f"{name} ({p.dtype})" for name, p in named.items() if p.dtype not in TYPES]
    if strange:
        raise ConfigError(
            f"strategy.compression: {listing(strange, 3)} would be rounded to float32, in which gradients are "
            "compressed; set it to none"
        )


def _pieces(named: Mapping[str, nn.Parameter], amounts: Mapping[str, float | None], start: int) -> list[Piece]:
    """Return the pieces one after the other, the first at ``start``."""
    starts = accumulate((p.numel() for p in named.values()), initial=start)
    return [
        Piece(name, tuple(p.shape), at, amounts.get(name) or 0.0)
        for (name, p), at in zip(named.items(), starts, strict=False)
    ]


def _keep(kept: Tensor, new: Tensor, good: Tensor) -> None:
    """Put ``new`` in the place of ``kept`` if ``good`` is true, on the device."""
    torch.where(good, new, kept, out=kept)


def _flat(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return the gradient of each parameter, flat, in fp32."""
    return [p.grad.reshape(-1).float() for p in parameters if p.grad is not None]


def _give_back(parameters: Iterable[nn.Parameter], flat: Tensor) -> None:
    """Copy ``flat``, in the order of ``parameters``, back into their gradients."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return
    sizes = [gradient.numel() for gradient in gradients]
    parts = torch.split(flat[: sum(sizes)], sizes)  # padding may follow
    torch._foreach_copy_(gradients, [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)])


def _all_reduce_s(device: torch.device, sent_bytes: float) -> float:
    """Measure the link, and return the seconds of an all-reduce that sends so many bytes. Every rank calls it.

    It takes a latency, and a time for each byte. A size's time is the mean of two laps after one that opens
    connections.
    """
    costs: list[tuple[float, float]] = []
    for size_bytes in PROBES:
        laps = []
        for _ in range(3):
            probe = torch.zeros(size_bytes // 4, device=device)
            dist.barrier()
            began = time.perf_counter()
            sum_across_ranks(probe).sum().item()  # item() waits: a GPU may not have begun before
            laps.append(time.perf_counter() - began)
        probe_bytes = 2 * (dist.get_world_size() - 1) / dist.get_world_size() * size_bytes
        costs.append((probe_bytes, sum(laps[1:]) / 2))
    (small_bytes, small_s), (large_bytes, large_s) = costs
    per_byte_s = max(0.0, large_s - small_s) / max(1.0, large_bytes - small_bytes)
    return small_s + max(0.0, sent_bytes - small_bytes) * per_byte_s


class Overlapped(Replicas):
    """See :class:`~toolkit.strategies.layouts.Layout`."""

    def __init__(self, session: Session, *, compression: str, **passes: Any) -> None:
        """Take the kind of compression; ``passes`` says how passes are made, see Replicas."""
        super().__init__(session, **passes)
        self._compression = compression
        self._wire = MeteredCollectives()

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

    def step_metrics(self) -> Mapping[str, float]:
        """Return the bytes that this rank sends in a step, and would send without compression."""
        return {"compression/sent_bytes": self._wire.sent_bytes, "compression/plain_bytes": self._plain_bytes}


class _BucketHook:
    """DDP's hook. It keeps nothing from one step to the next."""

    def __init__(self, scheme: Scheme, wire: MeteredCollectives, device: torch.device) -> None:
        self._scheme, self._wire, self._device = scheme, wire, device
        self._module = with_streams(device)
        self._stream = None if self._module is None else self._module.Stream(device)

    def send(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Replace the bucket's gradients by their means over the ranks. Return a future of them."""
        if not bucket.index():  # the first of a step
            self._wire.sent_bytes = 0.0
        gradients = bucket.buffer()
        sent: Future[Tensor] = Future(devices=[] if self._stream is None else [self._device])
        if self._stream is not None:  # send behind what has computed the gradients
            self._stream.wait_stream(self._module.current_stream(self._device))
        with nullcontext() if self._stream is None else self._module.stream(self._stream):
            size = len(gradients)
            values = torch.zeros(size + -size % self._scheme.multiple, device=self._device)
            values[:size].copy_(gradients)
            gradients.copy_(self._scheme.average(values)[:size])
            sent.set_result(gradients)  # DDP's streams will wait for what is enqueued here by now
        return sent


def build(config: StrategyConfig, session: Session, train: TrainConfig, how: dict[str, Any]) -> Layout:
    """Return the layout. ``how`` is what all layouts take."""
    # NCCL's collectives are only enqueued. What keeps nothing for the next step is sent during the backward pass then.
    # One rank has no DDP, whose hooks would do that.
    keeps_nothing = config.compression in STATELESS and not config.compression_layers
    if session.world_size > 1 and keeps_nothing and is_of_devices(dist.get_backend()):
        how |= {"channels_last": train.channels_last, "find_unused": config.find_unused}
        return Overlapped(session, compression=config.compression, **how)
    return Compressed(session, config=config, channels_last=train.channels_last, **how)
