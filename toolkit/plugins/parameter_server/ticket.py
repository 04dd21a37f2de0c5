"""A ticket as it is pushed: its numbers, besides the gradient."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import TypeAlias

from toolkit.plugins.parameter_server.mail import PeerMessage

#: Loss, weight, samples, samples of the global batch; see Push.
PassFigures: TypeAlias = tuple[float, float, int, int]


@dataclass(frozen=True)
class Push:
    """What a worker sends with a ticket's gradient, which is that of ``loss``."""

    step: int
    share: int
    version: int  #: of the weights with which it was computed
    loss: float  #: the sum over its samples, divided by ``assumed``
    weight: float  #: the weight of that sum; without weights, the number of samples
    samples: int
    assumed: int  #: samples of the global batch

    @property
    def part(self) -> float:
        """Return its part of the global batch."""
        return self.samples / self.assumed

    def numbers(self) -> tuple[float, ...]:
        return astuple(self)

    @staticmethod
    def of(message: PeerMessage) -> Push:
        step, share, version, loss, weight, samples, assumed = message.numbers
        return Push(int(step), int(share), int(version), loss, weight, int(samples), int(assumed))
