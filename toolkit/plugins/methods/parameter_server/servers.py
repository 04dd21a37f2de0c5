"""parameter_server: the first ranks keep the weights and apply the updates, the others compute gradients.

After Li et al., "Scaling Distributed Machine Learning with the Parameter Server" (OSDI 2014). A *ticket* is a share of
one step's global batch. A worker pushes its ticket's gradient to the servers, each of which takes what concerns its own
part of the parameters. Then it waits for new weights. The modes differ only in when these come:

* ``sync``: when all tickets of the step were applied together, added up in the order of the shares: the steps of ddp,
  to rounding. Nothing depends on which worker was faster, so a resume is the same bit for bit.
* ``async``: at once; each ticket is an update of its own (Hogwild's and DistBelief's way). Its gradient is the mean
  over its own samples, and is applied with the learning rate times its part of the global batch. So a pass over the
  data moves the weights as far as in ``sync``, also with optimizers such as Adam.
* ``bounded``: as ``async``, but a worker that is ``staleness`` tickets ahead of the slowest waits for it (Stale
  Synchronous Parallel, Ho et al., NIPS 2013).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import astuple

import torch
from torch import Tensor, nn

from toolkit.base.errors import ConfigError
from toolkit.config import StrategyConfig, TrainConfig, choose
from toolkit.config.strategy import ParameterServerConfig
from toolkit.plugins.methods.parameter_server.messaging import Handler, Kind, PeerMessage, PushHeader
from toolkit.plugins.methods.parameter_server.side import Flat, ParameterServerRank
from toolkit.ranks.batch import Batch, Share
from toolkit.ranks.session import Session
from toolkit.strategies.layouts import autocast
from toolkit.strategies.models import checkpoint_activations, evaluating, recompute_interval
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
from toolkit.strategies.priming import params_without_grad, priming, shareable, unused_message
from toolkit.strategies.protocol import StepOutput, Strategy
from toolkit.strategies.update import weights_and_buffers


class Server(ParameterServerRank):
    """Keeps a part of the parameters and of the optimizer's state."""

    share = Share(0, 0)

    def _get_ready(self, model: nn.Module, objective: Objective, sample: Batch | None) -> None:
        assert self._server is not None
        self._model = self._part
        self._parameters = [p for p, _ in self._exchanged(self._part, self._server)]
        self._place = Flat(self._parameters)
        self._packed: Tensor | None = None
        self._is_packed = False  #: whether that holds the newest weights
        self._version = 0  #: updates done

    def step(self, batch: Batch | None, lr: float) -> StepOutput:
        """Serve one step: return when a ticket of each share has come for it. Rank 0's loss is that of all."""
        self._is_synchronized = False
        loss = self._serve(lr)
        self._n += 1
        return StepOutput(torch.tensor(loss if self._rank == 0 else 0.0, dtype=torch.float64, device=self._device))

    def _serve(self, lr: float) -> float:
        raise NotImplementedError

    def _push(self, message: PeerMessage) -> None:
        """Take a ticket."""
        raise NotImplementedError

    def _handlers(self) -> dict[Kind, Handler]:
        return {Kind.PUSH: self._push}

    def _apply(self, gradients: Sequence[Tensor], lr: float) -> None:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        for parameter in self._part.parameters():  # no rows here, but the optimizer counts their steps as well
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._update.apply(lr)
        self._version += 1
        self._is_packed = False

    def _send_weights(self, worker: int) -> None:
        if not self._is_packed:
            self._packed = self._place.pack([p.detach() for p in self._parameters], self._packed)
            self._is_packed = True
        self._mail.send(worker, Kind.WEIGHTS, (self._version,), self._packed)

    def _refresh(self) -> None:
        self._is_packed = False  # a checkpoint may have been read into the weights
        for worker in self._workers:
            self._send_weights(worker)

    def evaluate(self, batch: Batch | None, measure: Measure) -> Sums:
        """Return no sums: a server evaluates nothing."""
        return Sums({}, 0)

    def step_metrics(self) -> Mapping[str, float | Tensor]:
        return self._update.step_metrics()

    def live_state(self) -> dict[str, Tensor]:
        return self._update.live_state()  # of its part


class SyncServer(Server):
    """Makes one update a step, of all shares."""

    def __init__(self, session: Session, config: ParameterServerConfig, train: TrainConfig) -> None:
        super().__init__(session, config, train)
        self._arrived: dict[int, PeerMessage] = {}

    def _push(self, message: PeerMessage) -> None:
        pushed = PushHeader.of(message)
        assert pushed.step == self._n, "a ticket comes in its step"
        assert pushed.share not in self._arrived, "and once"
        self._arrived[pushed.share] = message

    def _serve(self, lr: float) -> float:
        """Add the tickets up in the order of the shares (another order gives other last bits), and make one update."""
        gradients: list[Tensor] = []
        loss = weight = 0.0
        for share in range(self._count):
            # Shares that come before their turn wait in ``_arrived``.
            while share not in self._arrived:
                self._inbox.handle_next()
            message = self._arrived.pop(share)
            pushed, part = PushHeader.of(message), self._place.views(message.payload)
            if gradients:
                torch._foreach_add_(gradients, part)
            gradients = gradients or part
            loss, weight = loss + pushed.loss, weight + pushed.weight
        # The workers divided by the number of samples; the loss may weigh them otherwise.
        factor = _scale(gradients, pushed.assumed / max(weight, 1e-30))
        self._apply(gradients, lr)
        self._refresh()
        return loss * factor


def _scale(gradients: list[Tensor], factor: float) -> float:
    """Scale the gradients in place; skip a factor that changes nothing."""
    if gradients and factor != 1.0:
        torch._foreach_mul_(gradients, factor)
    return factor


class AsyncServer(Server):
    """Makes an update for each ticket."""

    def __init__(
        self, session: Session, config: ParameterServerConfig, train: TrainConfig, *, ahead: int | None
    ) -> None:
        super().__init__(session, config, train)
        self._ahead = ahead
        self._done = [0] * self._count  #: tickets of each share so far
        self._held: set[int] = set()  #: shares whose workers wait for weights
        self._lr = 0.0
        self._loss = 0.0
        self._stale: list[int] = []

    def begin(self, step: int) -> None:
        super().begin(step)
        self._done = [step] * self._count

    def _serve(self, lr: float) -> float:
        """Apply tickets until each share has one for this step; faster workers' later ones as well, with its rate."""
        self._lr = lr
        while min(self._done) <= self._n:
            self._inbox.handle_next()
        loss, self._loss = self._loss, 0.0
        return loss

    def _push(self, message: PeerMessage) -> None:
        pushed, gradients = PushHeader.of(message), self._place.views(message.payload)
        factor = _scale(gradients, pushed.assumed / max(pushed.weight, 1e-30))
        self._stale.append(self._version - pushed.version)
        # The rate is scaled by the ticket's part of the global batch; see ``async`` above.
        self._apply(gradients, self._lr * pushed.part)
        self._loss += pushed.loss * factor * pushed.part
        assert pushed.step == self._done[pushed.share], "each ticket comes once, and in order"
        self._done[pushed.share] += 1
        self._held.add(pushed.share)
        # Send new weights to the workers that are not too far ahead.
        slowest = min(self._done)
        for share in sorted(self._held):
            if self._ahead is None or self._done[share] - slowest <= self._ahead:
                self._held.discard(share)
                self._send_weights(self._workers[share])

    def step_metrics(self) -> Mapping[str, float | Tensor]:
        """Return the updates between the weights that a ticket was computed with and those that it changed."""
        if not self._stale:
            return super().step_metrics()
        stale, self._stale = torch.tensor(self._stale), []
        return {
            **super().step_metrics(),
            "staleness/mean": stale.double().mean().item(),
            "staleness/max": float(stale.max()),
            "staleness/tickets": stale,
        }


class Worker(ParameterServerRank):
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
        self._outbox: dict[int, Tensor | None] = dict.fromkeys(self._servers)  #: memory that each step overwrites
        # One pass that leaves nothing behind: it compiles, and shows which parameters are not used.
        with priming(objective, self._train, model, self._session.activity) as checked:
            self._objective = checked
            self._pass(sample)
        self._objective = objective
        unused = params_without_grad(model)
        model.zero_grad()
        if checked.refusal or unused:
            raise ConfigError(checked.refusal or unused_message(unused))

    def step(self, batch: Batch | None, lr: float) -> StepOutput:
        """Compute the ticket, push it, and wait for the weights that the mode requires."""
        assert batch is not None, "build() made sure that every worker has a sample"
        self._is_synchronized = False
        figures = self._pass(batch)
        self.local_stopwatch.stop()
        for server in self._servers:
            gradients = [rows_of(p.grad, rows) for p, rows in self._placed[server] if p.grad is not None]
            packed = self._outbox[server] = self._places[server].pack(gradients, self._outbox[server])
            pushed = PushHeader(self._n, self.share.index, self._versions[server], *figures)
            self._mail.send(server, Kind.PUSH, astuple(pushed), packed)
        self._model.zero_grad()
        self._refresh()
        self._n += 1
        return StepOutput(torch.zeros((), dtype=torch.float64, device=self._device))

    def _pass(self, batch: Batch) -> tuple[float, float, int, int]:
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

    def _refresh(self) -> None:
        """Take new weights from every server."""
        with torch.no_grad():
            for _ in self._servers:
                message = self._inbox.wait_for(Kind.WEIGHTS)
                placed = self._placed[message.sender]
                self._places[message.sender].unpack(message.payload, [rows_of(p, rows) for p, rows in placed])
                self._versions[message.sender] = int(message.numbers[0])

    @torch.no_grad()
    def evaluate(self, batch: Batch | None, measure: Measure) -> Sums:
        if batch is None or not len(batch):
            return Sums({}, 0)
        with evaluating(self._model), self._precision():
            batch = batch.to(self._device)
            return measured(measure, self._model, batch)

    def live_state(self) -> dict[str, Tensor]:
        return weights_and_buffers(self._model)


def rows_of(tensor: Tensor, rows: tuple[int, int] | None) -> Tensor:
    """Return these rows of it, live; None: all of it."""
    return tensor if rows is None else tensor[rows[0] : rows[1]]


def build(config: StrategyConfig, session: Session, train: TrainConfig) -> Strategy:
    """Return this rank's side of it. Raises ConfigError if there would be no worker."""
    chosen: ParameterServerConfig = config.parameter_server
    if chosen.servers >= session.world_size:
        raise ConfigError(
            f"strategy.parameter_server.servers: {chosen.servers} of {session.world_size} ranks leave no worker; use "
            "fewer, or more ranks"
        )
    # By how many tickets a worker may be ahead of the slowest; None: by any number, or none where all wait.
    ahead = choose(
        "strategy.parameter_server.mode", chosen.mode, {"sync": None, "async": None, "bounded": chosen.staleness}
    )
    if session.rank >= chosen.servers:
        return Worker(session, chosen, train, recompute=recompute_interval(config))
    if chosen.mode == "sync":
        return SyncServer(session, chosen, train)
    return AsyncServer(session, chosen, train, ahead=ahead)
