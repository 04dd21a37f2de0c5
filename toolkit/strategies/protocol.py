"""The strategy protocol: what the loop asks of a strategy.

Accumulation, scaling, communication and the update overlap and cannot be separated into smaller calls. So a strategy
does all of them in one method, :meth:`Strategy.step`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from toolkit.checkpoint.manifest import Manifest
from toolkit.metrics.meters import Stopwatch
from toolkit.ranks.batch import Batch, Share
from toolkit.ranks.collectives import gather_by_name, gather_objects, sum_by_name
from toolkit.ranks.state import Json, State
from toolkit.strategies.objective import Measure, Objective, Sums

ModelFactory: TypeAlias = Callable[[], nn.Module]
OptimizerFactory: TypeAlias = Callable[[nn.Module], Optimizer]

#: Prefix of the names of a rank's own weights in a checkpoint that was made inside a round; see InRounds.
REPLICA = "replica/"


@dataclass(frozen=True)
class StepOutput:
    """The results of a step, still on the device. Reading them would make the host wait."""

    loss: Tensor  # scalar: this rank's part of the global mean loss; the sum over the ranks is that mean
    #: Scalar, equal on all ranks: 0 if the step was made, else the reason for skipping it (``WHY`` in
    #: `toolkit.strategies.update`). None if no step is ever skipped.
    skipped: Tensor | None = None
    #: The losses that add up to ``loss``, by the job's names. Empty if the job has one loss without a name.
    parts: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, means: Mapping[str, Tensor], skipped: Tensor | None) -> StepOutput:
        """Return a step's output from this rank's part of each mean loss, by name."""
        loss, *others = means.values()
        return cls(sum(others, loss), skipped, {} if [*means] == [""] else means)

    def zeroed_if_skipped(self) -> dict[str, Tensor]:
        """Return ``loss`` and the parts by name, all 0 if the step was skipped: else they would spoil a mean."""
        values = {**self.parts, "loss": self.loss}
        if self.skipped is None:
            return values
        return {name: torch.where(self.skipped == 0, value, 0.0) for name, value in values.items()}


class Strategy(Protocol):
    """One way to share an optimizer step among ranks. Every rank makes the same calls in the same order."""

    @property
    def share(self) -> Share:
        """Return the part of each global batch that this rank is given."""

    @property
    def evaluates_together(self) -> bool:
        """True if :meth:`evaluate` waits for other ranks. An evaluation then ends early on all of them or on none."""

    @property
    def local_stopwatch(self) -> Stopwatch:
        """Return the stopwatch of this rank's work in a step, before its first wait for another rank.

        The loop starts it, and :meth:`step` stops it.
        """

    def build(
        self, model: ModelFactory, optimizer: OptimizerFactory, objective: Objective, sample: Batch | None
    ) -> None:
        """Make and wrap the model, then prime on ``sample``, a real batch.

        Priming leaves weights, buffers and random generators as they were made.
        """

    def prepare_split_data(self) -> None:
        """Prepare for ranks that read different parts of the data; called before the first step.

        BatchNorm's statistics must then fit all parts, in each step: else it mattered when a run is saved or stopped.
        """

    def begin(self, step: int) -> None:
        """Start or continue the training at ``step``. Called once, after :meth:`on_loaded`, before the first step."""

    def step(self, batch: Batch | None, lr: float) -> StepOutput:
        """Make one whole optimizer step on this rank's part of a global batch. No host sync.

        ``batch`` is on the session's device already, as loaders give it.
        """

    def evaluate(self, batch: Batch | None, measure: Measure) -> Sums:
        """Return ``measure`` over a batch, in evaluation mode and without gradients. None: no samples."""

    def sum(self, values: Mapping[str, float | Tensor]) -> dict[str, float]:
        """Return the sum of each value over the ranks, by name, equal on every rank.

        All ranks call it; a host sync. Every rank with samples gives the same names.
        """

    def by_rank(self, values: Mapping[str, float | Tensor]) -> dict[str, Tensor]:
        """Return each value of every rank, by name: float64 (ranks,) on the host.

        It is equal on every rank. All ranks call it; a host sync. Every rank with samples gives the same names.
        """

    def gather(self, value: Any) -> list[Any]:
        """Return what each rank gave, in rank order, on every rank. All call it."""

    def synchronize(self) -> None:
        """Wait until the steps made so far have taken effect on all ranks, which all call it."""

    def step_metrics(self) -> Mapping[str, float | Tensor]:
        """Return what was measured in the steps since the last call, by tag. A tensor (n,) is shown as a histogram.

        Called at logging steps on all ranks; may wait for devices.
        """

    def state(self) -> State:
        """Return all that a resume needs, named as in the unparallelized model. Tensors are live: filled in place.

        A strategy with ``same_state`` (`toolkit.registry.StrategySpec`) names what it alone keeps ``update/...``: the
        checkpoints of the others lack that, and it then keeps its initial value.
        """

    def live_state(self) -> Mapping[str, Tensor]:
        """Return this rank's own weights, buffers and optimizer state as they are now.

        Their names are ``weights/<name>``, ``buffers/<name>`` and ``optimizer/<parameter>/<slot>``. Nothing is sent.
        """

    def on_loaded(self, values: Mapping[str, Json]) -> None:
        """Continue from a checkpoint, whose tensors have been filled into those of :meth:`state`.

        ``values`` are the entries of :meth:`state` that are not tensors, as JSON gives them back, and ``step``: the
        next step. In a rollback that is another step than the checkpoint's. Optional entries may be missing.
        """

    def close(self) -> None:
        """Release the model and the optimizer."""


class SynchronousStrategy:
    """The parts of the protocol that are alike in strategies whose ranks make every step together."""

    _device: torch.device

    def prepare_split_data(self) -> None:
        return

    def begin(self, step: int) -> None:
        return

    def sum(self, values: Mapping[str, float | Tensor]) -> dict[str, float]:
        return sum_by_name(values, self._device)

    def by_rank(self, values: Mapping[str, float | Tensor]) -> dict[str, Tensor]:
        return gather_by_name(values, self._device)

    def gather(self, value: Any) -> list[Any]:
        return gather_objects(value)

    def synchronize(self) -> None:
        return  # all ranks have waited for every step

    def step_metrics(self) -> Mapping[str, float | Tensor]:
        return {}


@runtime_checkable
class LoadsByManifest(Protocol):
    """A strategy, or a user's own loop, whose places for tensors depend on what a checkpoint holds."""

    def places(self, manifest: Manifest) -> State:
        """Return what is to be filled from the checkpoint, in place of :meth:`Strategy.state`; no collective."""


@runtime_checkable
class RoundBased(Protocol):
    """A strategy whose replicas differ inside a round. Its state there is not that of a round's end."""

    def prepare_load(self, step: int, names: Collection[str]) -> State:
        """Prepare for reading a checkpoint of ``step`` steps that holds ``names``, and return the places for it.

        It is not a collective: another rank may have found the checkpoint damaged. May be called again for another
        checkpoint. Raises ConfigError for one that this strategy cannot continue from.
        """
