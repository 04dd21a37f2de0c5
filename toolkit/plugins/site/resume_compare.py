"""Compares what two runs recorded: which step is the first that differs, and in what."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from toolkit.base import fsio
from toolkit.base.errors import JobFailedError, listing
from toolkit.checkpoint.folder import CheckpointFolder
from toolkit.files.rundir import RunDir

#: At another world size these are compared sample by sample; nothing else is promised to be equal in every bit.
OF_SAMPLES = ("samples", "inputs", "targets")
#: Logged figures that must be equal, as those of evaluations must.
CURVES = ("train/loss", "train/lr")


#: The lines of a step's ranks, by step.
Steps: TypeAlias = Mapping[int, Mapping[int, Mapping[str, Any]]]


@dataclass(frozen=True)
class TraceRecord:
    """The traces of one run, by step and rank."""

    steps: Steps  #: the lines of the latest attempt that made the step
    attempts: Mapping[int, Steps]  #: the lines of each attempt
    begun: Mapping[int, int]  #: the first step of each attempt that has begun one
    conditions: Sequence[Mapping[str, Any]]


def read(run: RunDir) -> TraceRecord:
    """Return the record of a run."""
    attempts: dict[int, dict[int, dict[int, Mapping[str, Any]]]] = {}
    conditions: list[Mapping[str, Any]] = []
    begun: dict[int, int] = {}
    for path in sorted(run.trace.glob("rank-*.jsonl")):
        rank = int(path.stem.removeprefix("rank-"))
        for text in fsio.read_text(path).splitlines():
            line = json.loads(text)
            if "conditions" in line:
                conditions.append(line["conditions"])
            elif "from" in line:
                begun[line["attempt"]] = line["from"]
            else:
                attempts.setdefault(line["attempt"], {}).setdefault(line["step"], {})[rank] = line
    # A step may be made again, perhaps by another number of ranks.
    latest = {step: lines for attempt in sorted(attempts) for step, lines in attempts[attempt].items()}
    return TraceRecord(latest, attempts, dict(sorted(begun.items())), conditions)


def resume_points(record: TraceRecord) -> dict[int, str]:
    """Return the place of a resume from each step."""
    epochs = [lines[min(lines)]["epoch"] for _, lines in sorted(record.steps.items())]
    found: dict[int, str] = {}
    for step in range(1, len(epochs)):
        if epochs[step] != epochs[step - 1]:
            found[step] = EPOCH_END
        else:
            found[step] = FIRST_EPOCH if epochs[step] == epochs[0] else LATER_EPOCH
    return found


def compare(undisturbed: RunDir, disturbed: RunDir, plan: InterruptionPlan) -> ResumeCheckReport:
    """Compare the records step by step; if every bit is equal, then also the last checkpoints and the curves."""
    attempts = disturbed.attempts()
    if len(attempts) < 2:
        raise JobFailedError(
            f"{disturbed.path} ended before the signal ({'; '.join(plan.struck)}) reached it: choose an earlier step "
            "with --at, or more steps"
        )
    ours, theirs = read(undisturbed), read(disturbed)
    ranks = tuple(dict.fromkeys(attempt.world_size or 0 for attempt in (attempts[0], attempts[-1])))
    resumed = {attempt: step for attempt, step in theirs.begun.items() if attempt > 1 and step > 0}
    of_steps = resume_points(ours)
    first, broken, different, worst = None, None, dict[str, str](), None
    # Every bit must be equal only if the same ranks had the same samples.
    exact = len(ranks) == 1 and not plan.moving_shares
    views: list[tuple[int | None, Steps]] = [(None, theirs.steps)]
    if exact:
        # What an attempt has made is compared also where a later one has made the step again.
        views = [*sorted(theirs.attempts.items()), *views]
    else:
        both = ours.steps.keys() & theirs.steps.keys()
        worst = max((_deviation(ours.steps[step], theirs.steps[step]) for step in both), default=0.0)
    clocks = _clocks(ours.steps, theirs.attempts.get(1, {}), min(resumed.values(), default=0))
    for attempt, steps in views:
        for step in sorted(steps if attempt is not None else ours.steps.keys() | steps.keys()):
            mine, other = ours.steps.get(step, {}), steps.get(step, {})
            if attempt is not None:  # one that was killed may lack the lines of some ranks
                mine = {rank: line for rank, line in mine.items() if rank in other}
            different = _at(mine, other, plan, clocks, exact=exact)
            if different:
                # Only the first step that differs is reported.
                first, broken = step, _resume_of(attempt, step, resumed)
                break
        if different:
            break
    if first is None and exact:
        different = _last_checkpoints(undisturbed, disturbed) | _curves(undisturbed, disturbed)
    return ResumeCheckReport(
        steps=len(ours.steps),
        ranks=ranks,
        struck=plan.struck[: len(attempts) - 1],
        resumed=tuple(Resume(step, of_steps.get(step, "at the end")) for step in resumed.values()),
        first=first,
        broken=broken,
        different=different,
        nothing=_nothing(ours.steps, [*resumed.values()], len(attempts) - 1, len(plan.struck)),
        unseen=_unseen(ours.steps),
        places=tuple(dict.fromkeys(of_steps.values())) if plan.step is None else (),
        conditions=_changed([*ours.conditions, *theirs.conditions], but="world size" if len(ranks) > 1 else None),
        worst_loss=worst,
        moving_shares=plan.moving_shares,
        runs=(undisturbed.path, disturbed.path),
    )


def _resume_of(attempt: int | None, step: int, resumed: Mapping[int, int]) -> int | None:
    """Return which of the resumes, from 0, has made ``step``: that of ``attempt``, if it is known; None for none."""
    if attempt is not None:
        return [*resumed].index(attempt) if attempt in resumed else None
    return next((index for index, begun in reversed([*enumerate(resumed.values())]) if begun <= step), None)


def _clocks(ours: Steps, theirs: Steps, end: int) -> set[str]:
    """Return the logged tags that are not reproduced even before step ``end``, that of the first resume: times."""
    return {
        tag
        for step, lines in theirs.items()
        if step < end and step in ours
        for rank, line in lines.items()
        for tag, value in line["logged"].items()
        if ours[step].get(rank, line)["logged"].get(tag) != value
    }


def _nothing(steps: Steps, resumed: Sequence[int], struck: int, planned: int) -> str | None:
    """Return why runs without a difference prove nothing; None if they prove something."""
    if not resumed:
        return "no resumed run read a checkpoint, so that two runs from the beginning were compared"
    if struck < planned:
        return (
            f"only {struck} of {planned} kills happened, as no checkpoint was committed after the last one: see the "
            "log for why; one reason is an optimizer that was handed over and makes no step any more"
        )
    if _is_constant(steps, "weights", "buffers", "optimizer", "state"):
        return (
            "nothing of what is saved changes in any step, so that a resume has nothing to lose; is it this model that "
            "the loop trains, with a rate that is not 0?"
        )
    return None


def _unseen(steps: Steps) -> tuple[str, ...]:
    """Return what would not show if a resume lost it, for it is alike in all steps."""
    found: list[str] = []
    if _is_constant(steps, "lr"):
        found.append("a forgotten scheduler, for the learning rate is the same in every step")
    if _is_constant(steps, "inputs") and any(line.get("inputs") for lines in steps.values() for line in lines.values()):
        found.append("the order of the data, for every step has the same batch")
    if all(float.fromhex(line["loss"]) == 0.0 for lines in steps.values() for line in lines.values()):
        found.append("the loss, for none is logged (run.log(loss=loss))")
    return tuple(found)


def _is_constant(steps: Steps, *kinds: str) -> bool:
    """True if the ``kinds`` of a line are the same in every step of each rank."""
    seen: dict[int, list[Any]] = {}
    for lines in steps.values():
        for rank, line in lines.items():
            found = [line.get(kind) for kind in kinds]
            if seen.setdefault(rank, found) != found:
                return False
    return True


def _at(
    mine: Mapping[int, Any], other: Mapping[int, Any], plan: InterruptionPlan, clocks: Collection[str], *, exact: bool
) -> dict[str, str]:
    """Return what differs in one step, by kind. ``clocks`` are logged tags that do not count."""
    if not mine or not other:
        return {"step": f"only the {'undisturbed' if mine else 'disturbed'} run did it"}
    # Samples may have been on other ranks: compare them by their positions in the global batch.
    if not exact:
        one, two = _by_position(mine), _by_position(other)
        if one.keys() != two.keys():
            odd = sorted(one.keys() ^ two.keys())
            found = {"positions": f"{listing([str(p) for p in odd], 3)} is in one of them only"}
        else:
            found = {}
            for index, kind in enumerate(OF_SAMPLES):
                positions = [p for p in one if one[p][index] != two[p][index]]
                if positions:
                    found[kind] = f"{len(positions)} of {len(one)} samples, the first of them {one[min(positions)][0]}"
        deviation = _deviation(mine, other)
        if deviation > plan.tolerance:
            found["loss"] = f"{deviation:.1e} of its value, more than the {plan.tolerance:g} allowed"
        return found
    if mine.keys() != other.keys():
        return {"ranks": f"{len(mine)} and {len(other)} took part"}
    return {kind: text for kind in RECORDED if (text := _ranks_that_differ(kind, mine, other, clocks))}


def _ranks_that_differ(kind: str, mine: Mapping[int, Any], other: Mapping[int, Any], clocks: Collection[str]) -> str:
    """Name the ranks that differ, and the samples or tensors. Buffers are rank 0's: a save gives them to all."""
    ranks = sorted(mine) if kind != "buffers" else [rank for rank in mine if rank == 0]
    texts = []
    for rank in ranks:
        one, two = mine[rank].get(kind), other[rank].get(kind)
        if kind == "logged":
            one, two = ({tag: value for tag, value in line.items() if tag not in clocks} for line in (one, two))
        if one != two:
            # Say where they differ, as exactly as the kind allows.
            if isinstance(one, dict) and isinstance(two, dict):
                names = [name for name in one.keys() | two.keys() if one.get(name) != two.get(name)]
                where = f" ({listing([_values(kind, name, one, two) for name in sorted(names)], 2)})"
            elif isinstance(one, list) and isinstance(two, list) and len(one) == len(two):
                # Another loader than ours gives the digests of a batch's tensors, and no samples.
                samples = mine[rank]["samples"]
                word, labels = ("samples", samples) if len(samples) == len(one) else ("tensors", range(len(one)))
                columns = zip(labels, one, two, strict=True)
                differing = [label for label, ours, theirs in columns if ours != theirs]
                where = f" ({len(differing)} of {len(one)} {word}, the first of them {differing[0]})"
            elif kind == "loss":
                where = f" ({float.fromhex(one)!r} and {float.fromhex(two)!r})"
            elif kind == "lr":
                where = f" ({one} and {two})"
            else:
                where = ""
            texts.append(f"rank {rank}{where}")
    return listing(texts, 3)


def _values(kind: str, name: str, one: Mapping[str, str], two: Mapping[str, str]) -> str:
    """Return a name with its two values, where the trace has values and no digests."""
    values = [line.get(name, "absent") for line in (one, two)]
    if kind == "logged":
        values = [value if value == "absent" else repr(float.fromhex(value)) for value in values]
    elif kind != "state" or any(value.startswith("#") for value in values):
        return name
    return f"{name}: {' and '.join(values)}"


def _by_position(lines: Mapping[int, Any]) -> dict[int, tuple[Any, ...]]:
    """Return what stands at each position of one global batch, on any rank. Other loaders record no positions."""
    by_position: dict[int, tuple[Any, ...]] = {}
    for line in lines.values():
        positions = line.get("positions", ())
        columns = []
        for kind in OF_SAMPLES:
            column = line.get(kind, ())
            # A batch that is no pair has no targets, and a packed one has no row for each sample.
            if len(column) != len(positions):
                column = [None] * len(positions)
            columns.append(column)
        rows = zip(*columns, strict=True)
        by_position |= dict(zip(positions, rows, strict=True))
    return by_position


def _deviation(mine: Mapping[int, Any], other: Mapping[int, Any]) -> float:
    one, two = (sum(float.fromhex(line["loss"]) for line in lines.values()) for lines in (mine, other))
    return abs(one - two) / max(abs(one), abs(two), 1e-30)


def _last_checkpoints(one: RunDir, two: RunDir) -> dict[str, str]:
    """Compare every byte of the last checkpoints, verified."""
    both = [CheckpointFolder(run.checkpoints) for run in (one, two)]
    mine, other = (each.verify(each.list()[0]) for each in both)
    if mine.step != other.step:
        return {"last checkpoint": f"of step {mine.step} and of step {other.step}"}
    names = sorted(mine.tensors.keys() | other.tensors.keys())
    differing = [name for name in names if mine.tensors.get(name) != other.tensors.get(name)]
    return {"last checkpoint": listing(differing, 3)} if differing else {}


def _curves(one: RunDir, two: RunDir) -> dict[str, str]:
    """Compare TensorBoard's figures that do not depend on the clock.

    Among them are means over steps before and after a resume, and evaluations, for which all ranks' buffers count.
    """
    logged: list[dict[tuple[int, str], float]] = []
    for run in (one, two):
        lines = [json.loads(text) for text in fsio.read_text(run.tensorboard / "metrics.jsonl").splitlines()]
        tags = ((line["step"], tag, value) for line in lines for tag, value in line.items())
        logged.append({(step, tag): value for step, tag, value in tags if tag in CURVES or tag.startswith("eval/")})
    mine, other = logged
    texts = []
    for step, tag in sorted(mine.keys() | other.keys()):
        ours, theirs = mine.get((step, tag)), other.get((step, tag))
        if ours != theirs:
            texts.append(f"{tag} in step {step} ({ours} and {theirs})")
    return {"curves": listing(texts, 3)} if texts else {}


def _changed(conditions: Sequence[Mapping[str, Any]], but: str | None) -> dict[str, tuple[Any, ...]]:
    """Return the conditions for a resume in every bit that changed during the runs."""
    values = {key: tuple(dict.fromkeys(each.get(key) for each in conditions)) for key in conditions[0]}
    return {key: seen for key, seen in values.items() if len(seen) > 1 and key != but}


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
class InterruptionPlan:
    """The interruptions of a run of ``steps`` steps. ``how`` is ``kill`` or ``stop``, ``step`` None is at random."""

    steps: int = 60
    how: str = "kill"
    step: int | None = None
    seed: int | None = None
    then_ranks: int | None = None  #: resume with another number of ranks
    tolerance: float = 1e-3  #: for the loss, relative, if not every bit must be equal
    moving_shares: bool = False  #: data.balance: auto follows the clock, so bits may differ on equally many ranks, too
    struck: tuple[str, ...] = ()  #: the interruptions, in words


@dataclass(frozen=True)
class Resume:
    """An attempt that continued from a checkpoint of ``step`` steps. ``place`` is one of the places of a resume."""

    step: int
    place: str


@dataclass(frozen=True)
class ResumeCheckReport:
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


def as_dict(report: ResumeCheckReport) -> dict[str, Any]:
    """Return the report for ``--json``."""
    return {"verdict": report.verdict, **asdict(report), "runs": [str(path) for path in report.runs]}


def format_text(report: ResumeCheckReport, kept: Sequence[Path]) -> str:
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
                "more is not promised, for the shares follow the ranks' speed (data.balance: auto), which differs "
                "each time; batch statistics and dropout follow the shares (--tolerance)"
            )
        lines.append(f"loss: equal to {report.worst_loss:.1e} of its value; {why}")
    lines = [textwrap.fill(line, WIDTH, subsequent_indent="  ") for line in lines]
    if kept:
        lines += ["", *(f"{name}: {path}" for name, path in zip(("undisturbed", "disturbed"), kept, strict=True))]
        lines.append(f"`toolkit rm {' '.join(path.name for path in kept)}` removes them")
    return "\n".join(lines)


def _untried(report: ResumeCheckReport) -> list[str]:
    """Return lines about the places at which no resume began."""
    done = {resume.place for resume in report.resumed}
    absent = [place for place in (FIRST_EPOCH, LATER_EPOCH, EPOCH_END) if place not in report.places]
    missed = [place for place in report.places if place not in done]
    lines = [f"not tried: a resume {' or '.join(missed)}: no checkpoint was made there"] if missed else []
    if absent:
        lines.append(f"not tried: a resume {' or '.join(absent)}: the {report.steps} steps have none (--steps)")
    return lines


def _explained(report: ResumeCheckReport) -> list[str]:
    """Return lines about what the first difference means."""
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
