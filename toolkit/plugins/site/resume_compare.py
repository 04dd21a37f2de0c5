"""Compares what two runs recorded: which step is the first that differs, and in what."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.base.errors import JobFailedError, listing
from toolkit.checkpoint.folder import CheckpointFolder
from toolkit.files.rundir import RunDir
from toolkit.plugins.site.resume_report import RECORDED, CheckPlan, CheckReport

#: At another world size these are compared sample by sample; nothing else is promised to be equal in every bit.
OF_SAMPLES = ("samples", "inputs", "targets")
#: Logged figures that must be equal, beside those of evaluations.
CURVES = ("train/loss", "train/lr")


@dataclass(frozen=True)
class WitnessRecord:
    """The traces of one run. ``steps`` has, by step and rank, the line of the latest attempt."""

    steps: Mapping[int, Mapping[int, Mapping[str, Any]]]
    conditions: Sequence[Mapping[str, Any]]


def read(run: RunDir) -> WitnessRecord:
    """Return the record of a run."""
    lines: dict[int, dict[int, Mapping[str, Any]]] = {}
    conditions: list[Mapping[str, Any]] = []
    latest: dict[int, int] = {}
    for path in sorted(run.trace.glob("rank-*.jsonl")):
        rank = int(path.stem.removeprefix("rank-"))
        for text in path.read_text().splitlines():
            line = json.loads(text)
            if "conditions" in line:
                conditions.append(line["conditions"])
                continue
            step, attempt = line["step"], line["attempt"]
            if attempt > latest.get(step, 0):  # a step that is made again, perhaps by another number of ranks
                latest[step], lines[step] = attempt, {}
            if attempt == latest[step]:
                lines[step][rank] = line
    return WitnessRecord(lines, conditions)


def compare(undisturbed: RunDir, disturbed: RunDir, plan: CheckPlan, struck: str) -> CheckReport:
    """Compare the two records step by step. Then compare the bytes of the last checkpoints, and the curves.

    The latter are compared only if no step differs and every bit must be equal.
    """
    attempts = disturbed.attempts()
    if len(attempts) < 2:
        raise JobFailedError(
            f"{disturbed.path} ended before the signal of step {plan.step} reached it: choose an earlier step with "
            "--at, or more steps"
        )
    ours, theirs = read(undisturbed), read(disturbed)
    ranks = tuple(dict.fromkeys(attempt.world_size or 0 for attempt in (attempts[0], attempts[-1])))
    first, different, worst = None, dict[str, str](), None
    # Every bit must be equal only if the same ranks had the same samples.
    exact = len(ranks) == 1 and not plan.moving_shares
    if not exact:
        both = ours.steps.keys() & theirs.steps.keys()
        worst = max((_deviation(ours.steps[step], theirs.steps[step]) for step in both), default=0.0)
    for step in sorted(ours.steps.keys() | theirs.steps.keys()):
        differs = _at(step, ours, theirs, plan, exact=exact)
        if differs:
            # Only the first step that differs is reported.
            first, different = step, differs
            break
    if first is None and exact:
        different = _last_checkpoints(undisturbed, disturbed) | _curves(undisturbed, disturbed)
    return CheckReport(
        steps=len(ours.steps),
        ranks=ranks,
        struck=struck,
        resumed_from=attempts[1].step_start or 0,
        first=first,
        different=different,
        conditions=_changed([*ours.conditions, *theirs.conditions], but="world size" if len(ranks) > 1 else None),
        worst_loss=worst,
        moving_shares=plan.moving_shares,
        runs=(undisturbed.path, disturbed.path),
    )


def _at(step: int, ours: WitnessRecord, theirs: WitnessRecord, plan: CheckPlan, *, exact: bool) -> dict[str, str]:
    """Return what differs in one step, by kind."""
    mine, other = ours.steps.get(step, {}), theirs.steps.get(step, {})
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
    return {kind: text for kind in RECORDED if (text := _ranks_that_differ(kind, mine, other))}


def _ranks_that_differ(kind: str, mine: Mapping[int, Any], other: Mapping[int, Any]) -> str:
    """Name the ranks that differ, and the samples or tensors. Buffers are rank 0's: a save gives them to all."""
    ranks = [0] if kind == "buffers" else sorted(mine)
    texts = []
    for rank in ranks:
        one, two = mine[rank].get(kind), other[rank].get(kind)
        if one != two:
            # Say where they differ, as exactly as the kind allows.
            if isinstance(one, dict) and isinstance(two, dict):
                names = [name for name in one.keys() | two.keys() if one.get(name) != two.get(name)]
                where = f" ({listing(sorted(names), 2)})"
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
    mine, other = _logged(one), _logged(two)
    texts = []
    for point in sorted(mine.keys() | other.keys()):
        ours, theirs = mine.get(point), other.get(point)
        if ours != theirs:
            step, tag = point
            texts.append(f"{tag} in step {step} ({ours} and {theirs})")
    return {"curves": listing(texts, 3)} if texts else {}


def _logged(run: RunDir) -> dict[tuple[int, str], float]:
    lines = [json.loads(text) for text in (run.tensorboard / "metrics.jsonl").read_text().splitlines()]
    tags = ((line["step"], tag, value) for line in lines for tag, value in line.items())
    return {(step, tag): value for step, tag, value in tags if tag in CURVES or tag.startswith("eval/")}


def _changed(conditions: Sequence[Mapping[str, Any]], but: str | None) -> dict[str, tuple[Any, ...]]:
    """Return the conditions for a resume in every bit that changed during the runs."""
    values = {key: tuple(dict.fromkeys(each.get(key) for each in conditions)) for key in conditions[0]}
    return {key: seen for key, seen in values.items() if len(seen) > 1 and key != but}
