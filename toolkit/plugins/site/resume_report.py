"""What `toolkit resume-check` is asked and what it finds, and the page about it."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from toolkit.base.errors import listing

#: What a trace has, in the order in which one follows from the other, and what the page calls it.
RECORDED = {
    "lr": "learning rate",
    "positions": "positions in the order of the data",
    "samples": "sample ids",
    "inputs": "inputs (augmentation)",
    "targets": "targets",
    "random": "random state (dropout)",
    "loss": "loss",
    "weights": "weights",
    "buffers": "buffers",
    "optimizer": "optimizer state",
}

#: Of the page's lines, except paths.
WIDTH = 78


@dataclass(frozen=True)
class CheckPlan:
    """One interruption of a run of ``steps`` steps. ``how`` is ``kill`` or ``stop``, ``step`` None is at random."""

    steps: int = 60
    how: str = "kill"
    step: int | None = None
    seed: int | None = None
    then_ranks: int | None = None  #: resume with another number of ranks
    tolerance: float = 1e-3  #: for the loss, relative, if not every bit must be equal
    moving_shares: bool = False  #: data.share: auto follows the clock, so bits may differ on equally many ranks, too


@dataclass(frozen=True)
class CheckReport:
    """What was done and found: the first step that differs, and what differs in it."""

    steps: int
    ranks: tuple[int, ...]
    struck: str
    resumed_from: int
    first: int | None
    different: Mapping[str, str]
    conditions: Mapping[str, tuple[Any, ...]]
    worst_loss: float | None  #: the largest relative difference, if not every bit must be equal
    moving_shares: bool
    runs: tuple[Path, Path]

    @property
    def is_identical(self) -> bool:
        return self.first is None and not self.different


def as_dict(report: CheckReport) -> dict[str, Any]:
    """Return the report for ``--json``."""
    return {"identical": report.is_identical, **asdict(report), "runs": [str(path) for path in report.runs]}


def page(report: CheckReport) -> str:
    """Return the report for a terminal."""
    ranks = " then ".join(map(str, report.ranks))
    lines = [f"disturbed run: {report.struck}; resumed from step {report.resumed_from}", ""]
    if report.first is not None:
        lines.append(f"DIFFERENT from step {report.first} on ({ranks} ranks):")
    elif report.different:
        lines.append(f"DIFFERENT after {report.steps} steps ({ranks} ranks):")
    else:
        what = ", ".join(RECORDED.values()) + ", the bytes of the last checkpoint, and the curves"
        if report.worst_loss is not None:
            what = "positions, sample ids, inputs (augmentation) and targets of every sample"
        lines.append(f"IDENTICAL: {report.steps} steps on {ranks} ranks: {what}")
    lines += [f"  {RECORDED.get(kind, kind)}: {text}" for kind, text in report.different.items()]
    lines += [
        f"not the same all the time: {key} ({listing([str(v) for v in seen], 4)})"
        for key, seen in report.conditions.items()
    ]
    # A difference before the resume is not the resume's fault: say what else it may be.
    if report.first is not None and report.first < report.resumed_from:
        lines.append(
            "that is before the resume: the training draws from something that follows no seed, or an operation does "
            "not give the same bits each time (train.deterministic: true refuses those)"
        )
    elif report.first is not None and report.first == report.resumed_from:
        lines.append(
            "that is the first step after the resume: it uses something that no checkpoint has, such as an optimizer "
            "or another variable not handed to run.resumable, or a batch drawn before the loop or by the step before "
            "(docs/loop.md)"
        )
    if report.worst_loss is not None:
        why = (
            "models with batch statistics or dropout draw them for each rank, so that another number of ranks is "
            "another training (--tolerance)"
        )
        if report.moving_shares:
            why = (
                "more is not promised, for the shares follow the ranks' speed (data.share: auto), which is another one "
                "each time; batch statistics and dropout follow the shares (--tolerance)"
            )
        lines.append(f"loss: equal to {report.worst_loss:.1e} of its value; {why}")
    lines = [textwrap.fill(line, WIDTH, subsequent_indent="  ") for line in lines]
    lines += ["", *(f"{name}: {path}" for name, path in zip(("undisturbed", "disturbed"), report.runs, strict=True))]
    return "\n".join(lines)
