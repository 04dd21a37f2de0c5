"""The steps that were left out: read from the device, listed in ``skipped_steps.jsonl``, and counted.

The strategy decides on the device, see ``strategies/update/verdict.py``. The host reads the verdicts where it waits for
the device anyway: at a logging step and before a save. So a checkpoint never comes after a step that is not listed yet.
A step that a crash keeps from being listed is left out again by the resumed run.

The verdicts are equal on all ranks, and whether to roll back to a checkpoint is decided in logging steps only. So all
ranks decide alike without communication, and a run that was killed and resumed decides in the same step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from toolkit.base import fsio, logs
from toolkit.base.errors import ConfigError, listing
from toolkit.config import TrainConfig
from toolkit.data.loader import Batches
from toolkit.files import records
from toolkit.files.records import COUNT, Record
from toolkit.files.rundir import RunDir
from toolkit.ranks.session import Session
from toolkit.strategies.update.verdict import MADE, OVERFLOW, WHY

#: The log names this many steps; of later ones it gives only the number.
NAMED = 10
#: Without ``train.rollback_after`` the run ends after this many in a row, instead of wasting its time forever.
ENDLESS = 1000

_LINE = Record({"step": COUNT})

log = logs.get(__name__)


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
            self._listed = {line["step"] for line in records.read_lines(self._path, _LINE)}

    def note(self, step: int, skipped: Tensor | None) -> None:
        """Keep the verdict on step number ``step``, on the device."""
        if skipped is not None:
            self._unread.append((step, skipped))

    def read(self) -> int:
        """Read the verdicts noted, and return how many steps were left out. One host sync, or none."""
        if not self._unread:
            return 0
        verdicts = torch.stack([verdict for _, verdict in self._unread]).tolist()
        steps = [step for step, _ in self._unread]
        self._unread.clear()
        # Count and list what was not made; an overflow of fp16 counts as well, though it starts no row: it is a matter
        # of the loss scale, not of the weights or the samples.
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
            raise ConfigError(f"train.skip_bad_steps: {self._describe_row(self._streak[-1] + 1)}; {_ENDLESS}")
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

        Raises ConfigError if there was no checkpoint, or none made since the last rollback: it would happen again and
        again.
        """
        again = to is not None and self._rolled_back_at is not None and to <= self._rolled_back_at
        if to is None or again:
            raise ConfigError(f"train.rollback_after: {self._describe_row(step)}; {_TWICE if again else _NONE}")
        log.warning("%s: back to the weights of step %d; the data go on", self._describe_row(step), to)
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

    def restore(self, saved: Any) -> None:
        """Go on from a :meth:`state`; begin anew where a checkpoint has none."""
        if isinstance(saved, Mapping):
            self._count, self._rollbacks = saved["count"], saved["rollbacks"]
            self._streak, self._rolled_back_at = list(saved["row"]), saved["rolled_back_at"]
            self._waits = saved["waits"]

    def _list(self, new: list[tuple[int, int]]) -> None:
        """List the ``new`` steps on rank 0, with their positions and samples."""
        if not self._writes:
            return
        lines = []
        for step, why in new:
            first = step * self._loader.global_batch_size
            last = first + self._loader.global_batch_size - 1
            line = {"step": step, "why": WHY[why], "positions": [first, last]}
            samples = self._loader.global_samples(step)
            lines.append({**line, "samples": samples})
            self._listed.add(step)
            if len(self._listed) <= NAMED:
                log.warning("step %d is left out: %s; samples %s", step, WHY[why], listing(list(map(str, samples)), 8))
        if new and len(self._listed) > NAMED:
            log.warning("%d steps were left out; they are listed in %s", len(self._listed), self._path)
        self._lines.write(lines)

    def _describe_row(self, step: int) -> str:
        row = self._streak
        samples = [str(sample) for each in row[:NAMED] for sample in self._loader.global_samples(each)]
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
_ENDLESS = (
    "the weights do not get on any more. Set train.rollback_after, or optim.lr lower, and start from an earlier "
    "checkpoint (model.init_from)"
)
