"""Workers: compute the tickets."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from toolkit.base.errors import ConfigError
from toolkit.config import TrainConfig
from toolkit.config.strategy import ParameterServerConfig
from toolkit.plugins.methods.parameter_server.cuts import Flat
from toolkit.plugins.methods.parameter_server.mail import Handler, Kind, PassFigures, Push
from toolkit.plugins.methods.parameter_server.side import Side
from toolkit.ranks.batch import Batch, Share
from toolkit.ranks.session import Session
from toolkit.strategies.layouts import autocast
from toolkit.strategies.models import checkpoint_activations, evaluating
from toolkit.strategies.objective import (
    Loss,
    Measure,
    Objective,
    Sums,
    means_of,
    measured,
    refuse_other_weights,
    weights_of,
)
from toolkit.strategies.priming import priming, shareable, unused_message, without_gradient
from toolkit.strategies.protocol import StepOutput
from toolkit.strategies.update.apply import weights_and_buffers


class Worker(Side):
    """Has the whole model and computes gradients. The servers have the newest weights."""

    _objective: Objective

    def __init__(self, session: Session, config: ParameterServerConfig, train: TrainConfig, *, recompute: int) -> None:
        super().__init__(session, config, train)
        self.share = Share(self._rank - config.servers, self._count)
        self._recompute = recompute
        self._versions = dict.fromkeys(self._servers, 0)

    def _get_ready(self, model: nn.Module, objective: Objective, sample: Batch | None) -> None:
        sample = shareable(sample, self._count, "workers")
        self._model = model
        if self._recompute:
            checkpoint_activations(model, self._recompute)
        if self._train.compile:
            model.compile()
        # For each server: the parameters that concern it, and their places in its messages.
        self._placed = {server: self._exchanged(model, server) for server in self._servers}
        self._places: dict[int, Flat] = {}
        for server, placed in self._placed.items():
            self._places[server] = Flat([rows_of(p, rows) for p, rows in placed])
        self._outbox: dict[int, Tensor | None] = dict.fromkeys(self._servers)
        # One pass that leaves nothing behind: it compiles, and shows which parameters are not used.
        with priming(objective, self._train, model, self._session.activity) as checked:
            self._objective = checked
            self._pass(sample)
        self._objective = objective
        unused = without_gradient(model)
        model.zero_grad()
        if checked.refusal or unused:
            raise ConfigError(checked.refusal or unused_message(unused))

    # ------------------------------------------------------------------------------------------------------ one step

    def step(self, batch: Batch | None, lr: float) -> StepOutput:
        """Compute the ticket, push it, and wait for the weights that the mode requires."""
        assert batch is not None, "build() made sure that every worker has a sample"
        self._settled = False
        figures = self._pass(batch)
        self.own_time.stop()
        for server in self._servers:
            pushed = Push(self._n, self.share.index, self._versions[server], *figures)
            self._mail.send(server, Kind.PUSH, pushed.numbers(), self._packed(server))
        self._model.zero_grad()
        self._refresh()
        self._n += 1
        return StepOutput(torch.zeros((), dtype=torch.float64, device=self._device))

    def _pass(self, batch: Batch) -> PassFigures:
        """Leave the gradient in ``.grad``. Return the fields of its :class:`~.mail.Push` from the loss on."""
        # No more micro-batches than the smallest share has samples.
        parts = min(self._train.accumulate, batch.global_count // self._count)
        passes: list[dict[str, Loss]] = []
        for part in [batch] if parts == 1 else batch.split(parts):
            with self._precision():
                losses = self._objective(self._model, part)
            refuse_other_weights(losses, "strategy.name: parameter_server")
            first, *others = [loss.total / batch.global_count for loss in losses.values()]
            loss = sum(others, first)
            loss.backward()  # type: ignore[no-untyped-call]
            passes.append({"": Loss(loss.detach(), next(iter(losses.values())).weight)})
        # If the criterion gives no weights, each sample weighs one.
        weights = [weight for weight in weights_of(passes) if weight is not None]
        weight = float(sum(weight.detach().double() for weight in weights)) if weights else float(len(batch))
        return float(means_of(passes)[""]), weight, len(batch), batch.global_count

    def _precision(self) -> AbstractContextManager[object]:
        return autocast(self._device, self._train.precision)

    def _packed(self, server: int) -> Tensor:
        """Return the gradients that concern ``server``, in memory that the next step overwrites."""
        gradients = [rows_of(p.grad, rows) for p, rows in self._placed[server] if p.grad is not None]
        packed = self._outbox[server] = self._places[server].pack(gradients, self._outbox[server])
        return packed

    def _refresh(self) -> None:
        """Take new weights from every server."""
        with torch.no_grad():
            for _ in self._servers:
                message = self._inbox.wait_for(Kind.WEIGHTS)
                placed = self._placed[message.sender]
                self._places[message.sender].unpack(message.payload, [rows_of(p, rows) for p, rows in placed])
                self._versions[message.sender] = int(message.numbers[0])

    def _handlers(self) -> dict[Kind, Handler]:
        return {}

    @torch.no_grad()
    def evaluate(self, batch: Batch | None, measure: Measure) -> Sums:
        if batch is None or not len(batch):
            return Sums({}, 0)
        with evaluating(self._model), self._precision():
            batch = batch.to(self._device)
            return measured(measure, self._model, batch)

    def live(self) -> dict[str, Tensor]:
        return weights_and_buffers(self._model)


def rows_of(tensor: Tensor, rows: tuple[int, int] | None) -> Tensor:
    """Return these rows of it, live; None: all of it."""
    return tensor if rows is None else tensor[rows[0] : rows[1]]
