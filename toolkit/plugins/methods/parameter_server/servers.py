"""Servers: each keeps a part of the parameters, and updates it with the arriving gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from toolkit.config import TrainConfig
from toolkit.config.strategy import ParameterServerConfig
from toolkit.plugins.methods.parameter_server.cuts import Flat
from toolkit.plugins.methods.parameter_server.mail import Handler, Kind, PeerMessage, Push
from toolkit.plugins.methods.parameter_server.side import Side
from toolkit.ranks.batch import Batch, Share
from toolkit.ranks.session import Session
from toolkit.strategies.objective import Measure, Objective, Sums
from toolkit.strategies.protocol import StepOutput


class Server(Side):
    """Keeps a part of the parameters and of the optimizer's state."""

    share = Share(0, 0)

    def __init__(self, session: Session, config: ParameterServerConfig, train: TrainConfig) -> None:
        super().__init__(session, config, train)

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
        self._settled = False
        loss = self._serve(lr)
        self._n += 1
        return StepOutput(torch.tensor(loss if self._rank == 0 else 0.0, dtype=torch.float64, device=self._device))

    def _serve(self, lr: float) -> float:
        raise AssertionError("each mode does it in its own way")

    def _handlers(self) -> dict[Kind, Handler]:
        return {Kind.PUSH: self._push}

    def _push(self, message: PeerMessage) -> None:
        """Take a ticket."""
        raise AssertionError("each mode does it in its own way")

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

    def figures(self) -> Mapping[str, float | Tensor]:
        return self._update.figures()

    def live(self) -> dict[str, Tensor]:
        return self._update.live()  # of its part


class SyncServer(Server):
    """Makes one update a step, of all shares."""

    def __init__(self, session: Session, config: ParameterServerConfig, train: TrainConfig) -> None:
        super().__init__(session, config, train)
        self._arrived: dict[int, PeerMessage] = {}

    def _push(self, message: PeerMessage) -> None:
        pushed = Push.of(message)
        assert pushed.step == self._n, "a ticket comes in its step"
        assert pushed.share not in self._arrived, "and once"
        self._arrived[pushed.share] = message

    def _serve(self, lr: float) -> float:
        """Add the tickets up in the order of the shares, and make one update.

        Summed in the order of arrival, they would give other last bits.
        """
        gradients: list[Tensor] = []
        loss = weight = 0.0
        for share in range(self._count):
            # Shares that come before their turn wait in ``_arrived``.
            while share not in self._arrived:
                self._inbox.handle_next()
            message = self._arrived.pop(share)
            pushed, part = Push.of(message), self._place.views(message.payload)
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
        """Apply tickets until each share has one for this step.

        Tickets of later steps, by faster workers, are applied as well, with this step's learning rate.
        """
        self._lr = lr
        while min(self._done) <= self._n:
            self._inbox.handle_next()
        loss, self._loss = self._loss, 0.0
        return loss

    def _push(self, message: PeerMessage) -> None:
        pushed, gradients = Push.of(message), self._place.views(message.payload)
        factor = _scale(gradients, pushed.assumed / max(pushed.weight, 1e-30))
        self._stale.append(self._version - pushed.version)
        # The rate is scaled by the ticket's part of the global batch; see "Length of the steps" in the package.
        self._apply(gradients, self._lr * pushed.part)
        self._loss += pushed.loss * factor * pushed.part
        assert pushed.step == self._done[pushed.share], "each ticket comes once, and in order"
        self._done[pushed.share] += 1
        self._held.add(pushed.share)
        self._release()

    def _release(self) -> None:
        """Send new weights to the workers that are not too far ahead."""
        slowest = min(self._done)
        for share in sorted(self._held):
            if self._ahead is None or self._done[share] - slowest <= self._ahead:
                self._held.discard(share)
                self._send_weights(self._workers[share])

    def figures(self) -> Mapping[str, float | Tensor]:
        """Return the staleness of tickets.

        It is the number of updates between the weights that a ticket was computed with and those that it changed.
        """
        if not self._stale:
            return super().figures()
        stale, self._stale = torch.tensor(self._stale), []
        return {
            **super().figures(),
            "staleness/mean": stale.double().mean().item(),
            "staleness/max": float(stale.max()),
            "staleness/tickets": stale,
        }
