"""`train.on_nan`: end a training whose loss is not finite. Its weights are of no use any more.

The loop checks at logging steps and before saves, where the host waits for the device anyway. One mean that is not
finite is a warning. At the second in a row the attempt fails; the error names the step, its samples, and the first
layer whose output is not finite with the weights of the last checkpoint. The run is given up, because the same steps
would follow again from there. Weights that are not finite are not saved: the newest checkpoint stays fit for a resume.

With `train.skip_bad_steps` such steps are left out instead. The strategy decides on the device, see
``strategies/update.py``, equally on all ranks. The host reads the verdicts at the same places: so a
checkpoint never comes after a step that is not listed yet. A step that a crash keeps from being listed is left out
again by the resumed run. Whether to roll back to a checkpoint is decided in logging steps only, so that a run that was
killed and resumed decides in the same step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from toolkit import hang
from toolkit.base import fsio, logs
from toolkit.base.errors import NotFiniteError, listing
from toolkit.config import TrainConfig, choose
from toolkit.data.loader import Batches
from toolkit.data.randomness import reseed
from toolkit.files import records
from toolkit.files.records import JsonRecord
from toolkit.files.rundir import RunDir
from toolkit.ranks.collectives import gather_rows
from toolkit.ranks.session import Session
from toolkit.ranks.state import Json
from toolkit.strategies.protocol import RoundBased, Strategy
from toolkit.strategies.update import MADE, OVERFLOW, WHY

log = logs.get(__name__)


class NotFinite:
    """Checks the loss and the weights. Every rank makes the same calls and comes to the same result."""

    def __init__(self, config: TrainConfig, session: Session) -> None:
        self.stops = choose("train.on_nan", config.on_nan, {"stop": True, "warn": False})
        self.count = 0  #: number of logging steps whose mean loss was not finite, in the whole run
        self._session = session
        self._weights_were_finite = True  #: when a save was asked for last
        self._row = 0  #: means in a row that are not finite
        self._since = 0  #: the step before that row, or the first one of it, where that can be told
        self._what = ""  #: the row's beginning in words

    def judge(self, step: int, loss: float, losses: Sequence[float | Tensor]) -> None:
        """Check ``loss``, the mean of the steps before ``step``.

        ``losses`` are this rank's sums after each of these steps. With ``train.on_nan: stop``, raises NotFiniteError at
        the second mean in a row that is not finite.
        """
        if math.isfinite(loss):
            self._row, self._since, self._what = 0, step, ""
            return
        self._row, self.count = self._row + 1, self.count + 1
        if self._row == 1:
            self._what = f"the loss is not finite{self._beginning(step, losses)}"
            log.warning("step %d: %s", step, self._what)
        elif self.stops:
            self.raise_error(step)

    def state(self) -> dict[str, Json]:
        """Return what a checkpoint must hold: a stop does not end the row of bad means."""
        row: dict[str, Json] = {"count": self.count, "row": self._row, "since": self._since, "what": self._what}
        return {"finite": self._weights_were_finite, "not_finite": row}

    def restore(self, meta: Mapping[str, Any]) -> None:
        """Continue from a checkpoint whose ``meta`` has a :meth:`state`."""
        self._weights_were_finite, saved = meta["finite"], meta["not_finite"]
        self.count, self._row, self._since, self._what = (saved[key] for key in ("count", "row", "since", "what"))

    def may_save(self, step: int, weighed: LiveWeights) -> bool:
        """True if all weights are finite on all ranks, or ``train.on_nan`` is ``warn``; a collective, a host sync."""
        self._weights_were_finite = weighed.sum({"bad": float(bool(bad_weights(weighed.live_state())))})["bad"] == 0
        if self._weights_were_finite or not self.stops:
            return True
        log.warning("step %d is not saved: the weights are not finite", step)
        return False

    def raise_error(self, step: int) -> NoReturn:
        """Raise NotFiniteError after ``step`` steps. All ranks call it."""
        what = self._what or f"the weights are not finite after step {step}, the last one"
        raise NotFiniteError(f"train.on_nan: {what}; {self._advice(step)}; train.on_nan: warn trains on")

    def _beginning(self, step: int, losses: Sequence[float | Tensor]) -> str:
        """Return where the row of bad means before ``step`` begins, as the end of a phrase; a collective."""
        ranks = bad_ranks_phrase(all(map(math.isfinite, losses[-1:])), self._session.device)
        return f"{ranks}, since a step after step {self._since}"

    def _advice(self, step: int) -> str:
        return "look at the data and the learning rate, then resume"


class JobNotFinite(NotFinite):
    """Tells a job's first bad step, its samples, and the layer.

    ``roll_back(step, newest)`` is that of the run's checkpoints.
    """

    def __init__(
        self,
        config: TrainConfig,
        session: Session,
        strategy: Strategy,
        loader: Batches,
        roll_back: Callable[[int, int], int | None],
    ) -> None:
        super().__init__(config, session)
        self._seed = config.seed
        self._strategy, self._loader, self._roll_back = strategy, loader, roll_back

    def _beginning(self, step: int, losses: Sequence[float | Tensor]) -> str:
        totals = self._strategy.sum({str(index): loss for index, loss in enumerate(losses)})
        first = next((index for index, total in enumerate(totals.values()) if not math.isfinite(total)), 0)
        self._since = step - len(losses) + first
        ranks = bad_ranks_phrase(all(map(math.isfinite, losses[first : first + 1])), self._session.device)
        samples = listing(list(map(str, self._loader.global_indices(self._since))), 8)
        return f" since step {self._since}{ranks} (samples {samples})"

    def _advice(self, step: int) -> str:
        return (
            f"{self._cause(step)}. Look at these samples and at optim.lr, optim.warmup_steps and train.clip_norm, or "
            "set train.skip_bad_steps: true, then resume"
        )

    def _cause(self, step: int) -> str:
        """Return what is wrong, as the end of a sentence. It names the layer where the strategy can find it."""
        bad = bad_weights(self._strategy.live_state())
        now = f"of this rank's weights {len(bad)} are not finite: {listing(bad, 3)}" if bad else "the weights are"
        first_bad_layer = getattr(self._strategy, "first_bad_layer", None)
        if first_bad_layer is None or isinstance(self._strategy, RoundBased) or not self._what:
            return now
        # Repeat the first bad step on weights that were still good, with the same batch and random numbers.
        self._session.activity.phase = hang.LOADING
        good_step = self._roll_back(step, self._since)
        try:
            batch = self._loader.at(self._since)
        except ValueError:  # a stream cannot go back
            return now
        reseed(self._seed, self._since, self._strategy.share.index)
        layer = first_bad_layer(batch)
        weights = "the weights as they are now"
        if good_step is not None:
            weights = f"the weights of the checkpoint of step {good_step}"
        if layer is None:
            return f"with {weights} all layers give finite values for these samples: the training has diverged since"
        return f"with {weights} the first output for these samples that is not finite is that of {layer}"


def bad_ranks_phrase(is_finite: bool, device: torch.device) -> str:
    """Return `` on rank 2`` for the ranks where it is not, as the end of a phrase; a collective."""
    rows = gather_rows(torch.tensor([is_finite], dtype=torch.uint8, device=device)).flatten().tolist()
    ranks = [str(rank) for rank, fine in enumerate(rows) if not fine]
    return f" on rank{'s' if len(ranks) > 1 else ''} {listing(ranks, 8)}" if 0 < len(ranks) < len(rows) else ""


class LiveWeights(Protocol):
    """Weights on every rank, of a strategy or of a user's own loop."""

    def live_state(self) -> Mapping[str, Tensor]: ...

    def sum(self, values: Mapping[str, float | Tensor]) -> dict[str, float]: ...


def bad_weights(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names in ``Strategy.live_state()`` of weights, or parts of them, that are not finite. A host sync."""
    live: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if name.startswith("weights/") and (value.is_floating_point() or value.is_complex()) and value.numel():
            # torch has no norm for floats of one byte.
            live[name.removeprefix("weights/")] = value.detach().float() if value.itemsize == 1 else value.detach()
    if not live:
        return []
    largest = torch._foreach_norm([*live.values()], math.inf)  # the largest, or NaN
    is_finite = torch.stack([value.double() for value in largest]).isfinite().tolist()
    return [name for name, fine in zip(live, is_finite, strict=True) if not fine]


#: The log names this many steps; of later ones it gives only the number.
NAMED = 10
#: Without ``train.rollback_after`` the run ends after this many in a row, instead of wasting its time forever.
ENDLESS = 1000


@dataclass(frozen=True)
class _SkippedStep(JsonRecord):
    """A line of ``skipped_steps.jsonl``, as far as it is read."""

    step: int


class SkippedSteps:
    """One rank's record of the steps left out. It is equal on all ranks, and rank 0 writes the list."""

    def __init__(self, config: TrainConfig, session: Session, loader: Batches) -> None:
        self._is_on = config.skip_bad_steps or config.precision == "fp16"
        self._after = config.rollback_after
        self._loader = loader
        self._writes = session.is_main
        self._path = RunDir(session.run_dir).skipped_steps
        self._listed: set[int] = set()
        self._lines = fsio.PatientLines(self._path)
        self._unread: list[tuple[int, Tensor]] = []
        self._count = self._rollbacks = 0
        self._streak: list[int] = []  #: the steps left out since the last one that was made
        self._rolled_back_at: int | None = None
        self._waits = False  #: the last steps were left out or rolled back, and none was made since
        # A resumed run leaves some steps out again: they are in the list already.
        if self._is_on and self._writes:
            self._listed = {line.step for line in records.read_lines(self._path, _SkippedStep)}

    def note(self, step: int, skipped: Tensor | None) -> None:
        """Keep the verdict on step number ``step``, on the device."""
        if skipped is not None:
            self._unread.append((step, skipped))

    def collect(self) -> int:
        """Read the verdicts noted, and return how many steps were left out. One host sync, or none."""
        if not self._unread:
            return 0
        verdicts = torch.stack([verdict for _, verdict in self._unread]).tolist()
        steps = [step for step, _ in self._unread]
        self._unread.clear()
        # An overflow of fp16 counts as well, but starts no row: it is a matter of the loss scale.
        left_out: list[tuple[int, int]] = []
        for step, why in zip(steps, verdicts, strict=True):
            if why == MADE:
                self._streak, self._waits = [], False
                continue
            left_out.append((step, why))
            if why != OVERFLOW:
                self._streak, self._waits = [*self._streak, step], True
        self._count += len(left_out)
        self._list([(step, why) for step, why in left_out if step not in self._listed])
        if self._after is None and len(self._streak) >= ENDLESS:
            raise NotFiniteError(
                f"train.skip_bad_steps: {self._describe_row(self._streak[-1] + 1)}; training makes no progress. "
                "Set train.rollback_after, or optim.lr lower, and start from an earlier checkpoint (model.init_from)"
            )
        return len(left_out)

    @property
    def rollback_due(self) -> bool:
        """True if the run must go back to a checkpoint; call it after :meth:`read`."""
        return self._after is not None and len(self._streak) >= self._after

    @property
    def first_in_row(self) -> int:
        """Return the first step of the row that was left out. No later checkpoint is worth going back to."""
        return self._streak[0]

    @property
    def saves_wait(self) -> bool:
        """True if saves must wait. A rollback may drop these weights soon, and they would push out better ones."""
        return self._after is not None and self._waits

    def rolled_back(self, step: int, to: int | None) -> None:
        """Note that after ``step`` steps the weights are those of the checkpoint ``to`` again.

        Raises NotFiniteError if there was no checkpoint, or none made since the last rollback: it would happen again
        and again.
        """
        again = to is not None and self._rolled_back_at is not None and to <= self._rolled_back_at
        if to is None or again:
            raise NotFiniteError(f"train.rollback_after: {self._describe_row(step)}; {_TWICE if again else _NONE}")
        log.warning("%s: back to the weights of step %d; the data continue", self._describe_row(step), to)
        self._rollbacks, self._rolled_back_at = self._rollbacks + 1, step
        self._streak, self._waits = [], True

    def figures(self) -> dict[str, int]:
        """Return the counts for TensorBoard and the run's result."""
        if not self._is_on:
            return {}
        counts = {"train/skipped_steps": self._count}
        if self._after is not None:
            counts["train/rollbacks"] = self._rollbacks
        return counts

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint; call it after :meth:`read`."""
        assert not self._unread
        return {
            "count": self._count,
            "rollbacks": self._rollbacks,
            "row": self._streak,
            "rolled_back_at": self._rolled_back_at,
            "waits": self._waits,
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Continue from a :meth:`state`."""
        self._count, self._rollbacks = saved["count"], saved["rollbacks"]
        self._streak, self._rolled_back_at = list(saved["row"]), saved["rolled_back_at"]
        self._waits = saved["waits"]

    def _list(self, new: list[tuple[int, int]]) -> None:
        """List the ``new`` steps on rank 0, with their positions and samples."""
        if not self._writes:
            return
        lines, size = [], self._loader.global_batch_size
        for step, why in new:
            positions, samples = [step * size, (step + 1) * size - 1], self._loader.global_indices(step)
            lines.append({"step": step, "why": WHY[why], "positions": positions, "samples": samples})
            self._listed.add(step)
            if len(self._listed) <= NAMED:
                log.warning("step %d is left out: %s; samples %s", step, WHY[why], listing(list(map(str, samples)), 8))
        if new and len(self._listed) > NAMED:
            log.warning("%d steps were left out; they are listed in %s", len(self._listed), self._path)
        self._lines.write(lines)

    def _describe_row(self, step: int) -> str:
        row = self._streak
        samples = [str(sample) for each in row[:NAMED] for sample in self._loader.global_indices(each)]
        return (
            f"{len(row)} steps in a row, {row[0]} to {row[-1]} of the {step} so far, were left out "
            f"(samples {listing(samples, 12)}; all are in {self._path})"
        )


_NONE = (
    "there is no checkpoint yet to go back to. Look at these samples and at optim.lr and warmup_steps, or set "
    "checkpoint.every_steps lower"
)
_TWICE = (
    "and there is no newer checkpoint than at the last rollback, so it would happen again. Look at these samples, or "
    "set optim.lr lower, then resume"
)
