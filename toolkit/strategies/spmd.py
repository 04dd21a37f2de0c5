"""Every rank runs the same program on its own part of the batch: data parallelism through DistributedDataParallel.

Exactness. torch's DDP averages the gradients of W ranks with equal weight, which is the gradient of the mean loss only
where all shares are equal. Here rank r's loss is sum_r * W / weight, with the weight of the whole global batch, so that
DDP's (1/W) * sum over r is the gradient of (sum over r of sum_r) / weight: the mean over the global batch, however
unevenly its samples are shared or split into parts.

Bitwise. DDP sums its first iteration in another bucket layout than all later ones, so the first step after a resume
would differ in the last bits from the same step of an undisturbed run. Every start therefore primes: one throw-away
pass over a real batch, after which every step of every attempt sums alike. (No ``static_graph``: it would be wrong,
silently, for a model that leaves out layers at random.)
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from toolkit.activity import PRIMING
from toolkit.dist.batch import Batch, Share
from toolkit.dist.collectives import broadcast_tensors, start_sum
from toolkit.dist.session import Session
from toolkit.dist.state import Json, Replicated
from toolkit.errors import ConfigError, listing
from toolkit.metrics.stopwatch import stopwatch
from toolkit.strategies.optimizer_state import OptimizerState
from toolkit.strategies.protocol import Criterion, Measure, ModelFactory, OptimizerFactory, StepOutput, Sums

#: No broadcast of buffers in every forward pass: see ``_equalise_buffers``. torch 2.15 renamed the option.
_KEEP_BUFFERS: dict[str, Any] = (
    {"forward_sync_buffers": False}
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else {"broadcast_buffers": False}
)


class Spmd:
    """Replicates the model on every rank and averages the gradients; see :class:`~.protocol.Strategy`."""

    round_steps = 1
    expendable: frozenset[int] = frozenset()

    _model: nn.Module
    _ddp: DistributedDataParallel
    _optimizer: Optimizer
    _optimizer_state: OptimizerState
    _criterion: Criterion

    def __init__(self, session: Session, *, precision: str, accumulate: int, compile: bool) -> None:
        self.share = Share(session.rank, session.world_size)
        self._device = session.device
        self._activity = session.activity
        self._bf16 = precision == "bf16"
        self._accumulate = accumulate
        self._compile = compile
        self._buffers_equal = False
        self.own_time = stopwatch(session.device)

    def build(
        self, model: ModelFactory, optimizer: OptimizerFactory, criterion: Criterion, sample: Batch | None
    ) -> None:
        """Raises ConfigError when a rank would have no sample, a parameter no gradient, or compiling fails."""
        batch = self._checked(sample)
        self._model = model().to(self._device).train()
        if self._compile:
            self._model.compile()  # in place: the names in state() stay those of the model
        self._optimizer = optimizer(self._model)
        self._optimizer_state = OptimizerState(self._model, self._optimizer)
        self._criterion = criterion
        self._ddp = DistributedDataParallel(self._model, gradient_as_bucket_view=True, **_KEEP_BUFFERS)
        self._equalise_buffers()  # torch < 2.15 with that option leaves the first ones as each rank made them
        with _compile_errors(self._compile):
            self._prime(batch)

    def step(self, batch: Batch | None, lr: float) -> StepOutput:
        assert batch is not None, "build() made sure that every share holds a sample"
        self._optimizer_state.forget_unfilled()
        self._buffers_equal = False
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        loss = self._forward_backward(batch.to(self._device))
        self._optimizer.step()
        self._optimizer.zero_grad()
        return StepOutput(loss)

    @torch.no_grad()
    def evaluate(self, batch: Batch | None, measure: Measure) -> Sums:
        self._equalise_buffers()
        if batch is None or not len(batch):
            return Sums({}, 0)
        batch = batch.to(self._device)
        self._model.eval()
        with self._autocast():
            values = measure(self._model(batch.inputs), batch.targets)
        self._model.train()
        return Sums(values, len(batch))

    def state(self) -> dict[str, Replicated]:
        """``model/<name>`` and ``optim/<parameter>/<slot>``; a collective, since buffers are broadcast first."""
        self._equalise_buffers()
        weights = {f"model/{name}": Replicated(value) for name, value in self._model.state_dict().items()}
        return weights | self._optimizer_state.entries()

    def live(self) -> dict[str, Tensor]:
        weights = {f"weights/{name}": value for name, value in self._model.named_parameters()}
        buffers = {f"buffers/{name}": value for name, value in self._model.named_buffers()}
        return weights | buffers | self._optimizer_state.live()

    def loaded(self, values: Mapping[str, Json]) -> None:
        self._optimizer_state.filled(values)
        self._buffers_equal = True

    def close(self) -> None:
        for name in ("_ddp", "_model", "_optimizer", "_optimizer_state", "_criterion"):
            self.__dict__.pop(name, None)

    # ------------------------------------------------------------------------------------------------ one step

    def _forward_backward(self, batch: Batch) -> Tensor:
        """Leave the gradient of the global mean loss in ``.grad``; return this rank's part of that loss."""
        *early, last = self._parts(batch)
        losses: list[Tensor] = []
        weights: list[Tensor | None] = []
        for part in early:
            with self._ddp.no_sync():
                self._forward(part, losses, weights).backward()  # type: ignore[no-untyped-call]
        loss = self._forward(last, losses, weights)
        self.own_time.stop()  # while the last part goes backward, gradients are summed
        total = _WeightSum.start(weights)
        loss.backward()  # type: ignore[no-untyped-call]
        mean = (sum(losses[1:], losses[0]) / self.share.count).detach()
        return mean if total is None else mean * self._reweigh(total.wait(), batch.global_count)

    def _parts(self, batch: Batch) -> list[Batch]:
        """Micro-batches; a share smaller than their number has fewer, and still one to take part in the all-reduce."""
        if self._accumulate == 1:
            return [batch]
        return [part for part in batch.split(self._accumulate) if len(part)]

    def _forward(self, batch: Batch, losses: list[Tensor], weights: list[Tensor | None]) -> Tensor:
        """The loss to go backward from, as if each sample of the global batch weighed one."""
        with self._autocast():
            total, weight = self._criterion(self._ddp(batch.inputs), batch.targets)
        loss = total * (self.share.count / batch.global_count)
        losses.append(loss.detach())
        weights.append(weight)
        return loss

    def _reweigh(self, weight: Tensor, assumed: int) -> Tensor:
        """Turn gradients made for a global weight of ``assumed`` into those for ``weight``; returns the factor.

        A global batch that weighs nothing has gradients of zero, which stay zero instead of becoming NaN.
        """
        factor = (assumed / weight.clamp(min=1e-30)).float()
        torch._foreach_mul_([p.grad for p in self._model.parameters() if p.grad is not None], factor)
        return factor

    def _autocast(self) -> AbstractContextManager[object]:
        return torch.autocast(self._device.type, torch.bfloat16) if self._bf16 else nullcontext()

    def _equalise_buffers(self) -> None:
        """BatchNorm's statistics differ between ranks after a step: those of share 0 count. Once after each step."""
        if not self._buffers_equal:
            broadcast_tensors(self._model.buffers(), source=0)
            self._buffers_equal = True

    # ------------------------------------------------------------------------------------------------- priming

    def _checked(self, sample: Batch | None) -> Batch:
        if sample is None or sample.global_count < self.share.count:
            size = "fewer samples than ranks" if sample is None else f"{sample.global_count} samples"
            raise ConfigError(
                f"data.global_batch_size: {size} cannot be shared by {self.share.count} ranks: some would have none; "
                f"use {self.share.count} or more"
            )
        return sample

    def _prime(self, batch: Batch) -> None:
        """One pass that leaves its mark on DDP's buckets (and the compiler's cache) only."""
        self._activity.phase = PRIMING
        buffers = [buffer.clone() for buffer in self._model.buffers()]
        devices = [self._device] if self._device.type != "cpu" else []
        with torch.random.fork_rng(devices, device_type=self._device.type if devices else "cuda"):
            self.own_time.start()
            self._forward_backward(batch.to(self._device))
        self.own_time.take()  # it may have compiled the model
        self._refuse_unused_parameters()
        self._optimizer.zero_grad()
        for buffer, before in zip(self._model.buffers(), buffers, strict=True):
            buffer.copy_(before)

    def _refuse_unused_parameters(self) -> None:
        """DDP would complain about them in the next step, and with accumulation silently leave them out."""
        named = self._model.named_parameters()
        unused = [name for name, parameter in named if parameter.requires_grad and parameter.grad is None]
        if unused:
            raise ConfigError(
                f"model: the loss does not depend on {listing(unused, 5)}; freeze such parameters "
                "(requires_grad_(False)) or use them in forward()"
            )


class _WeightSum:
    """The global weight on its way: summed over the ranks while the last part goes backward."""

    def __init__(self, local: Tensor) -> None:
        self._sum = local.detach().double()
        self._work = start_sum(self._sum)

    @classmethod
    def start(cls, weights: Sequence[Tensor | None]) -> _WeightSum | None:
        """None when the criterion gives no weight: then the weight is the number of samples, which all ranks know."""
        given = [weight for weight in weights if weight is not None]
        return cls(torch.stack(given).sum()) if given else None

    def wait(self) -> Tensor:
        self._work.wait()
        return self._sum


@contextmanager
def _compile_errors(compiling: bool) -> Iterator[None]:
    """Say which key to change when torch.compile cannot do it, instead of pages of the compiler's own."""
    if not compiling:
        yield
        return
    from torch._dynamo.exc import TorchDynamoException

    try:
        yield
    except TorchDynamoException as error:
        cause = inspect.cleandoc(str(error)).split("\n")[0]
        raise ConfigError(
            f"train.compile: torch.compile failed on this model ({type(error).__name__}: {cause}); "
            "set train.compile: false, or see that a C++ compiler is on the ranks' PATH"
        ) from error
