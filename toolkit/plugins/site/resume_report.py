"""What `toolkit resume-check` is asked and what it finds, and the page about it."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
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
    "logged": "logged figures",
    "weights": "weights",
    "buffers": "buffers",
    "optimizer": "optimizer state",
    "state": "other state",
}

#: The places at which a resume can begin: each may lose something else.
FIRST_EPOCH, LATER_EPOCH, EPOCH_END = "within the first epoch", "within a later epoch", "at an epoch's end"

IDENTICAL, DIFFERENT, PROVES_NOTHING = "IDENTICAL", "DIFFERENT", "PROVES NOTHING"

#: Of the page's lines, except paths.
WIDTH = 78


@dataclass(frozen=True)
class CheckPlan:
    """The interruptions of a run of ``steps`` steps. ``how`` is ``kill`` or ``stop``, ``step`` None is at random."""

    steps: int = 60
    how: str = "kill"
    step: int | None = None
    seed: int | None = None
    then_ranks: int | None = None  #: resume with another number of ranks
    tolerance: float = 1e-3  #: for the loss, relative, if not every bit must be equal
    moving_shares: bool = False  #: data.share: auto follows the clock, so bits may differ on equally many ranks, too
    struck: tuple[str, ...] = ()  #: the interruptions, in words


@dataclass(frozen=True)
class Resume:
    """An attempt that went on from a checkpoint of ``step`` steps. ``place`` is one of the places at a resume."""

    step: int
    place: str


@dataclass(frozen=True)
class CheckReport:
    """What was done and found: the first step that differs, and what differs in it."""

    steps: int
    ranks: tuple[int, ...]
    struck: tuple[str, ...]
    resumed: tuple[Resume, ...]  #: from a checkpoint
    first: int | None
    broken: int | None  #: which of ``resumed`` has made the step ``first``, from 0; None: none
    different: Mapping[str, str]
    nothing: str | None  #: why the check proves nothing
    unseen: tuple[str, ...]  #: what was alike in all steps, so that its loss would not show
    places: tuple[str, ...]  #: those that the steps have; () if the step was asked for
    conditions: Mapping[str, tuple[Any, ...]]
    worst_loss: float | None  #: the largest relative difference, if not every bit must be equal
    moving_shares: bool
    runs: tuple[Path, Path]

    @property
    def verdict(self) -> str:
        if self.first is not None or self.different:
            return DIFFERENT
        return IDENTICAL if self.nothing is None else PROVES_NOTHING


def as_dict(report: CheckReport) -> dict[str, Any]:
    """Return the report for ``--json``."""
    return {"verdict": report.verdict, **asdict(report), "runs": [str(path) for path in report.runs]}


def page(report: CheckReport, kept: Sequence[Path]) -> str:
    """Return the report for a terminal. ``kept`` are the runs that are still there."""
    resumes = [f"step {resume.step} ({resume.place})" for resume in report.resumed]
    lines = [f"disturbed run: {'; '.join(report.struck)}"]
    lines += [f"resumed from {listing(resumes)}"] if resumes else []
    lines += _untried(report) if report.places else []
    lines.append("")
    if report.first is not None:
        lines.append(f"DIFFERENT from step {report.first} on ({' then '.join(map(str, report.ranks))} ranks):")
    elif report.different:
        lines.append(f"DIFFERENT after {report.steps} steps ({' then '.join(map(str, report.ranks))} ranks):")
    elif report.nothing is not None:
        lines.append(f"PROVES NOTHING: {report.nothing}")
    else:
        what = ", ".join(RECORDED.values()) + ", the bytes of the last checkpoint, and the curves"
        if report.worst_loss is not None:
            what = "positions, sample ids, inputs (augmentation) and targets of every sample"
        lines.append(f"IDENTICAL: {report.steps} steps on {' then '.join(map(str, report.ranks))} ranks: {what}")
    lines += [f"  {RECORDED.get(kind, kind)}: {text}" for kind, text in report.different.items()]
    if report.verdict == IDENTICAL and report.unseen:
        lines.append(f"not shown: {'; '.join(report.unseen)}")
    lines += [
        f"not the same all the time: {key} ({listing([str(v) for v in seen], 4)})"
        for key, seen in report.conditions.items()
    ]
    lines += _explained(report)
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
    if kept:
        lines += ["", *(f"{name}: {path}" for name, path in zip(("undisturbed", "disturbed"), kept, strict=True))]
        lines.append(f"`toolkit rm {' '.join(path.name for path in kept)}` removes them")
    return "\n".join(lines)


def _untried(report: CheckReport) -> list[str]:
    """Return lines about the places at which no resume began."""
    done = {resume.place for resume in report.resumed}
    absent = [place for place in (FIRST_EPOCH, LATER_EPOCH, EPOCH_END) if place not in report.places]
    missed = [place for place in report.places if place not in done]
    lines = [f"not tried: a resume {' or '.join(missed)}: no checkpoint was made there"] if missed else []
    if absent:
        lines.append(f"not tried: a resume {' or '.join(absent)}: the {report.steps} steps have none (--steps)")
    return lines


def _explained(report: CheckReport) -> list[str]:
    """Return lines about what the first difference tells."""
    if report.first is None:
        return []
    # A difference before a resume is not the resume's fault: say what else it may be.
    if report.broken is None:
        return [
            "that is before a resume: the training draws from something that follows no seed, reads what the first "
            "run has written (such as a checkpoint of the script's own, found in its folder), or an operation does "
            "not give the same bits each time (train.deterministic: true refuses those)"
        ]
    resume, held = report.resumed[report.broken], report.resumed[: report.broken]
    if report.first != resume.step:
        return []
    text = f"that is the first step after the resume {resume.place}: it uses something that no checkpoint has, "
    if resume.place == LATER_EPOCH and held:
        return [
            text + "and that the first epoch does not need: something made before an epoch's steps, or kept from the "
            "epoch before (docs/loop.md)"
        ]
    return [
        text + "such as an optimizer or another variable not handed to run.resumable, an iterator that the loop draws "
        "from by next(), or a batch drawn before the loop or by the step before (docs/loop.md)"
    ]
