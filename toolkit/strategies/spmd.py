"""Every rank runs the same program on its own part of the batch. A layout decides how the model lies on the ranks.

Exactness. torch averages the gradients of W ranks with equal weight (DDP and FSDP alike). That is the gradient of the
mean loss only if all shares are equal. Here rank r's loss is sum_r * W / weight, with the weight of the whole global
batch. So (1/W) * sum over r is the gradient of (sum over r of sum_r) / weight: the mean over the global batch, however
unevenly its samples are shared or split into parts.

Bitwise. DDP sums its first iteration in another bucket layout than all later ones. The first step after a resume would
therefore differ in the last bits from the same step of an undisturbed run. So every start primes: it makes one
throw-away pass over a real batch, after which every step of every attempt sums alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from toolkit.config import TrainConfig
from toolkit.metrics.meters import stopwatch
from toolkit.ranks.batch import Batch
from toolkit.ranks.collectives import broadcast_tensors, start_sum, sum_across_ranks, sum_tensors
from toolkit.ranks.session import Session
from toolkit.ranks.state import Entry, Json, entry, local
from toolkit.strategies.layouts import Layout
from toolkit.strategies.models import SUFFIX, ExtraState, evaluating, synchronised, to_training_mode
from toolkit.strategies.objective import (
    Loss,
    Measure,
    Objective,
    Sums,
    TrialPass,
    common_weight,
    means_of,
    measured,
    place_learnt,
    refuse_other_weights,
    weights_of,
)
from toolkit.strategies.priming import params_without_grad, priming, refuse_together, shareable
from toolkit.strategies.protocol import ModelFactory, OptimizerFactory, StepOutput, SynchronousStrategy
from toolkit.strategies.update import OptimizerWrapper


class Spmd(SynchronousStrategy):
    """The training of one model that ``layout`` puts on the ranks; see :class:`~.protocol.Strategy`."""

    _model: nn.Module
    _update: OptimizerWrapper
    _extra: ExtraState
    _objective: Objective
    _learnt: nn.Module | None  #: the objective's module, if it has parameters that are trained
    _stand_in: Batch  #: a batch for the passes of a rank that has nothing left to evaluate

    def __init__(self, session: Session, layout: Layout, train: TrainConfig) -> None:
        self.share = layout.share
        self._device = session.device
        self._activity = session.activity
        self._layout = layout
        self.evaluates_together = layout.passes_are_joint
        self._train = train
        self.local_stopwatch = stopwatch(session.device)

    def build(
        self, model: ModelFactory, optimizer: OptimizerFactory, objective: Objective, sample: Batch | None
    ) -> None:
        """Raises ConfigError if a rank would have no sample, a parameter no gradient, or compiling fails."""
        batch = shareable(sample, self.share.count)
        if self._train.sync_batch_norm:
            model = synchronised(model)
        self._model = to_training_mode(self._layout.place(model, TrialPass(objective, batch, self._device)))
        broadcast_tensors(self._model.buffers(), source=0)  # each rank made its own
        self._objective, self._learnt = objective, place_learnt(objective, self._device)
        self._update = OptimizerWrapper(self._model, optimizer(self._model), self._train, criterion=self._learnt)
        self._extra = ExtraState(self._model)
        # Refuse a model that computes something else once it is cut. The comparison needs equal buffers.
        self._layout.verify_model()
        self._prime(batch)

    def prepare_split_data(self) -> None:
        self._update.average_statistics()

    def step(self, batch: Batch | None, lr: float) -> StepOutput:
        assert batch is not None, "build() made sure that every share holds a sample"
        self._update.begin()
        means = self._forward_backward(batch)
        skipped = self._update.apply(lr)  # the optimizer steps
        return StepOutput.of(means, skipped)

    @torch.no_grad()
    def evaluate(self, batch: Batch | None, measure: Measure) -> Sums:
        self._update.broadcast_buffers()
        self._update.evaluating()
        found = Sums({}, 0)
        with evaluating(self._model), self._layout.precision():
            if batch is not None and len(batch):
                batch = batch.to(self._device)
                found = measured(measure, self._model, batch)
                if not self._layout.counts:  # another rank counts the same samples
                    found = found.zeroed()
                if self._layout.passes_are_joint:
                    self._stand_in = batch
            elif self._layout.passes_are_joint:  # the others wait for this rank's part of the weights
                measure(self._model, self._stand_in)  # its figures are dropped
        self._layout.reshard()
        return found

    def state(self) -> dict[str, Entry]:
        """Return ``model/<name>`` and ``optim/<parameter>/<slot>``. A collective, since buffers are broadcast first."""
        self._update.broadcast_buffers()
        return self._declared(self._extra.entries())

    def _declared(self, extra: Mapping[str, Entry]) -> dict[str, Entry]:
        """Return the entries of :meth:`state` as they are now, with the extra state ``extra``. Nothing is sent."""
        named = self._model.state_dict().items()
        entries = {f"model/{name}": entry(value) for name, value in named if not name.endswith(SUFFIX)}
        return dict(self._layout.mark_shards({**entries, **extra, **self._layout.state(), **self._update.state()}))

    def live_state(self) -> dict[str, Tensor]:
        return self._update.live_state()

    def step_metrics(self) -> dict[str, float]:
        return {**self._layout.step_metrics(), **self._update.step_metrics()}

    def on_loaded(self, values: Mapping[str, Json]) -> None:
        self._update.on_loaded(values)
        self._extra.on_loaded(values)

    @torch.no_grad()
    def first_bad_layer(self, batch: Batch | None) -> str | None:
        """Return the first module with an output that is not finite for ``batch``, on any rank; None if there is none.

        Every rank calls it. A module is named before those that hold it. With ``train.compile`` only the model as a
        whole is looked at.
        """
        assert batch is not None, "build() made sure that every share holds a sample"
        modules = {"": self._model} if self._train.compile else dict(self._model.named_modules())
        names = [f"layer {name} ({type(module).__name__})" if name else "the model" for name, module in modules.items()]
        names.append("the loss")
        bad: list[int] = []  #: the number of the first

        def look(number: int, output: object) -> None:
            if isinstance(output, Tensor) and not bad and not local(output).isfinite().all():
                bad.append(number)

        # Repeat the step's forward passes; hooks note the first output that is not finite, the loss comes last.
        handles = []
        for number, module in enumerate(modules.values()):
            hook = partial(lambda number, _module, _args, output: look(number, output), number)
            handles.append(module.register_forward_hook(hook))
        try:
            for micro_batch in self._micro_batches(batch):
                with self._layout.precision():
                    for loss in self._objective(self._layout.forward, micro_batch).values():
                        look(len(modules), loss.total)
        finally:
            for handle in handles:
                handle.remove()
        self._layout.reshard()
        # The first bad layer of a rank is one number. Over all ranks the smallest such number is the answer.
        counts = self.sum({str(number): float(number in bad) for number in range(len(names))})
        return next((names[int(number)] for number, count in counts.items() if count), None)

    def close(self) -> None:
        for name in ("_layout", "_model", "_update", "_extra", "_objective", "_learnt", "_stand_in"):
            self.__dict__.pop(name, None)

    def _forward_backward(self, batch: Batch) -> dict[str, Tensor]:
        """Leave the gradient of the global mean loss in ``.grad``. Returns this rank's part of each loss, by name."""
        *early, last = self._micro_batches(batch)
        split_by = f"train.accumulate: {len(early) + 1}" if early else None
        passes: list[dict[str, Loss]] = []
        joint = self._layout.passes_are_joint
        if joint:
            self.local_stopwatch.stop()  # from here on this rank waits for the others' parts of the weights
        # Micro-batches but the last only add to this rank's gradients; the pass of the last one sends their sum.
        for micro_batch in early:
            with self._layout.without_sync():
                self._forward(micro_batch, passes, split_by).backward()  # type: ignore[no-untyped-call]
        loss = self._forward(last, passes, split_by)
        if not joint:
            self.local_stopwatch.stop()  # gradients are summed while the last micro-batch goes backward
        # The sum of the global weight overlaps the last backward pass. Without weights it is the number of samples.
        weights = [weight for weight in weights_of(passes) if weight is not None]
        total = (torch.stack(weights).sum() * self._layout.counts).detach().double() if weights else None
        in_progress = None if total is None else start_sum(total)
        loss.backward()  # type: ignore[no-untyped-call]
        means = means_of(passes, 1 / self.share.count, self._layout.counts)
        if total is not None and in_progress is not None:
            in_progress.wait()
            factor = self._reweigh(total, batch.global_count)  # before compression: residuals have their weight
            means = {name: mean * factor for name, mean in means.items()}
        self._layout.average()
        # No layout knows of what the criterion learns.
        sum_tensors(self._criterion_gradients(), part=1 / dist.get_world_size())
        return means

    def _criterion_gradients(self) -> list[Tensor]:
        parameters = () if self._learnt is None else self._learnt.parameters()
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    def _micro_batches(self, batch: Batch) -> list[Batch]:
        """Return the micro-batches, equally many on all ranks: no more than the smallest share has samples."""
        count = min(self._train.accumulate, batch.global_count // self.share.count)
        return [batch] if count == 1 else batch.split(count)

    def _forward(self, batch: Batch, passes: list[dict[str, Loss]], split_by: str | None) -> Tensor:
        """Return the loss for the backward pass. It is divided as if each sample of the global batch weighed one.

        ``split_by`` names the config key by which this is not the rank's whole batch; losses with different weights
        are then refused. The losses are appended to ``passes``.
        """
        with self._layout.precision():
            losses = self._objective(self._layout.forward, batch, batch.global_count / self.share.count)
        if split_by is not None:
            refuse_other_weights(losses, split_by)
        elif not common_weight(losses):
            # Scale losses with weights of different kinds as if each sample of the global batch weighed one. The
            # gradients of one pass cannot be told apart afterwards, so ranks wait for the weights before the backward
            # pass.
            samples = len(batch)
            own = [loss.total.new_tensor(samples) if loss.weight is None else loss.weight for loss in losses.values()]
            weights = torch.stack([weight.detach().double() for weight in own])
            sums = sum_across_ranks(weights * self._layout.counts)
            factors = (batch.global_count / sums.clamp(min=1e-30)).to(own[0].dtype)
            scaled = zip(losses.items(), factors, strict=True)
            losses = {name: Loss(loss.total * factor) for (name, loss), factor in scaled}
        passes.append({name: Loss(loss.total.detach(), loss.weight) for name, loss in losses.items()})
        first, *others = [loss.total for loss in losses.values()]
        return self._update.scaled(sum(others, first))

    def _reweigh(self, weight: Tensor, assumed: float) -> Tensor:
        """Turn gradients made for a global weight of ``assumed`` into those for ``weight``. Return the factor.

        A global batch that weighs nothing has gradients of zero, which stay zero instead of becoming NaN.
        """
        factor = (assumed / weight.clamp(min=1e-30)).float()
        gradients = [local(p.grad) for p in self._model.parameters() if p.grad is not None]
        torch._foreach_mul_(gradients, factor.to(gradients[0].device))  # the host, if they are offloaded
        for gradient in self._criterion_gradients():
            gradient.mul_(factor)
        return factor

    def _prime(self, batch: Batch) -> None:
        """Make one pass that changes only torch's buckets (and the compiler's cache)."""
        # The layout's own state (residuals of compression, say) is put back below; priming() covers the modules.
        own = (entry.value for entry in self._layout.state().values())
        kept = [(value, value.clone()) for value in own if isinstance(value, Tensor)]
        objective = self._objective
        primed = priming(objective, self._train, self._model, self._activity)
        with primed as checked, self._update.track_changed_buffers():
            self._objective = checked
            torch.manual_seed(0)  # as in a step, ranks with the same share draw the same numbers
            self.local_stopwatch.start()
            self._forward_backward(batch)
        self._objective = objective
        self.local_stopwatch.take()  # it may have compiled the model
        self._layout.step_metrics()
        refuse_together(checked.refusal, params_without_grad(self._model, self._learnt))
        self._update.drop()
        for value, earlier in kept:
            value.copy_(earlier)
