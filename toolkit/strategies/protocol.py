"""What the loop may ask of a strategy: one verb for a whole optimizer step.

Accumulation, scaling, communication and the update straddle any finer cut, so a strategy does all of them in
:meth:`Strategy.step`, and the loop knows neither the model nor the number of processes behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from toolkit.dist.batch import Batch, Share
from toolkit.dist.collectives import gather_by_name, sum_by_name
from toolkit.dist.state import Json, State
from toolkit.metrics.stopwatch import Stopwatch
from toolkit.strategies.objective import Measure, Objective, Sums

ModelFactory: TypeAlias = Callable[[], nn.Module]
OptimizerFactory: TypeAlias = Callable[[nn.Module], Optimizer]

#: ``again(step, share)``: any share of any step's global batch, with the random generators seeded as for that share.
Again: TypeAlias = Callable[[int, Share], Batch]
#: What stands before the name of a rank's own weights in a checkpoint that was made inside a round; see InRounds.
REPLICA = "replica/"


@dataclass(frozen=True)
class StepOutput:
    """What a step leaves on the device, unread: reading it would make the host wait."""

    loss: Tensor  # scalar: this rank's part of the global mean loss; the sum over the ranks is that mean
    #: Scalar, equal on all ranks: 0 where the step was made, else why it was left out (``verdict.WHY``). None where
    #: no step ever is.
    skipped: Tensor | None = None
    #: The losses that ``loss`` is the sum of, by the names that the job gave; empty where it has one without a name.
    parts: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, means: Mapping[str, Tensor], skipped: Tensor | None) -> StepOutput:
        """Make one of this rank's part of each mean loss, by name."""
        loss, *others = means.values()
        return cls(sum(others, loss), skipped, {} if [*means] == [""] else means)

    def counted(self) -> dict[str, Tensor]:
        """``loss`` and the parts by name, or 0 where the step was left out: what is not finite would spoil a mean."""
        values = {**self.parts, "loss": self.loss}
        if self.skipped is None:
            return values
        return {name: torch.where(self.skipped == 0, value, 0.0) for name, value in values.items()}


class Strategy(Protocol):
    """One way to share an optimizer step among ranks. Every rank makes the same calls in the same order."""

    @property
    def share(self) -> Share:
        """The part of each global batch that this rank is given."""

    @property
    def round_steps(self) -> int:
        """Another world size resumes only at multiples of this many steps."""

    @property
    def expendable(self) -> frozenset[int]:
        """Ranks whose death does not end the attempt."""

    @property
    def lost(self) -> frozenset[int]:
        """Ranks that have died, as all agree since the last :meth:`sum` or :meth:`settle`; ``share`` is then another
        part of the same whole, for evaluations."""

    @property
    def evaluates_together(self) -> bool:
        """Whether :meth:`evaluate` waits for other ranks: then an evaluation ends early on all of them or on none."""

    @property
    def own_time(self) -> Stopwatch:
        """Started by the loop as each step begins; stopped in :meth:`step`, before the first wait for another rank."""

    def build(
        self, model: ModelFactory, optimizer: OptimizerFactory, objective: Objective, sample: Batch | None
    ) -> None:
        """Make and wrap the model, then prime on ``sample``, a real batch; leaves weights, buffers and RNG as made."""

    def split_data(self) -> None:
        """Ranks read different parts of the data: BatchNorm's statistics are to fit all of them. Before the first step.

        In each step, so that when a run is saved, looked at or stopped changes nothing.
        """

    def begin(self, step: int, again: Again) -> None:
        """The training goes on with ``step``. With ``again`` a rank can do what another one has died over."""

    def step(self, batch: Batch | None, lr: float) -> StepOutput:
        """One whole optimizer step on this rank's part of a global batch, without a host sync."""

    def evaluate(self, batch: Batch | None, measure: Measure) -> Sums:
        """``measure`` over a batch, in evaluation mode and without gradients; None takes part with no sample."""

    def sum(self, values: Mapping[str, float | Tensor]) -> dict[str, float]:
        """Each value added up over the ranks by its name, equal on every rank; all call it. A host sync.

        Every rank with samples gives the same names; ranks that have died add nothing.
        """

    def by_rank(self, values: Mapping[str, float | Tensor]) -> dict[str, Tensor]:
        """Each value of every rank, float64 (ranks,) on the host, equal on every rank; all call it. A host sync.

        Every rank with samples gives the same names; those of ranks that have died are 0.
        """

    def gather(self, value: Any) -> list[Any]:
        """What each rank gave, by rank, on every rank; all call it. Raises ConfigError where ranks may die."""

    def settle(self) -> None:
        """After steps, before what must see the same weights and buffers everywhere; all ranks call it."""

    def figures(self) -> Mapping[str, float | Tensor]:
        """What was measured in the steps since last asked, by tag; asked at logging steps on all ranks, may wait for
        devices. A tensor (n,) of numbers is to be shown as a histogram."""

    def state(self) -> State:
        """All that a resume needs, as live tensors to be filled in place, named as in the unparallelised model."""

    def live(self) -> Mapping[str, Tensor]:
        """This rank's own ``weights/<name>``, ``buffers/<name>`` and ``optimizer/<parameter>/<slot>`` as they are now.

        Nothing is sent or equalised for it: whoever looks changes nothing.
        """

    def loaded(self, values: Mapping[str, Json]) -> None:
        """After the fill; ``values`` are the entries of :meth:`state` that are no tensors, and ``step``: the next one.

        In a rollback that is another step than the one of the checkpoint.
        """

    def close(self) -> None:
        """Let go of the model and the optimizer."""


class AllNeeded:
    """What strategies have in common in which every rank is needed: the parts of the protocol for those that are not.

    A class that inherits it has a ``_device``.
    """

    round_steps = 1
    expendable: frozenset[int] = frozenset()
    lost: frozenset[int] = frozenset()
    _device: torch.device

    def split_data(self) -> None:
        """Nothing depends on it."""

    def begin(self, step: int, again: Again) -> None:
        """Nothing depends on either."""

    def sum(self, values: Mapping[str, float | Tensor]) -> dict[str, float]:
        """One all-reduce."""
        return sum_by_name(values, self._device)

    def by_rank(self, values: Mapping[str, float | Tensor]) -> dict[str, Tensor]:
        """One all-gather."""
        return gather_by_name(values, self._device)

    def gather(self, value: Any) -> list[Any]:
        """One collective of pickled values, between the ranks of this run."""
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values

    def settle(self) -> None:
        """Every step has been waited for by all."""

    def figures(self) -> Mapping[str, float | Tensor]:
        """None."""
        return {}


@runtime_checkable
class InRounds(Protocol):
    """A strategy whose replicas differ inside a round, so that its state is another one there than at a round's end."""

    def enter(self, step: int, names: Collection[str]) -> None:
        """A checkpoint of ``step`` steps that holds ``names`` is about to be read: what ``state()`` declares next are
        the places for it, and is no collective. May be called again for another one. Raises ConfigError for one that
        this strategy cannot go on from."""
