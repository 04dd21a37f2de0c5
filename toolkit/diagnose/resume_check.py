"""`toolkit resume-check`: whether a run of this config that is killed and resumed equals an undisturbed run.

The config is trained for some steps twice. The second run is interrupted in a random place and comes back as it always
does. In both runs a witness (`toolkit.train.trace`) records what every rank was given and computed, in every step.
The two records are compared, by the first step in which they differ.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from toolkit import config as configs
from toolkit import fsio, logs, rundir
from toolkit.checkpoint.store import CheckpointStore
from toolkit.errors import JobFailedError, RequestError, listing
from toolkit.launch.submission.handle import Run
from toolkit.launch.submission.resume import resume
from toolkit.launch.submission.submit import submit
from toolkit.rundir import RunDir

#: What a witness records, in the order in which one follows from the other, and what the page calls it.
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
#: At another world size these are compared sample by sample; nothing else is promised to be equal in every bit.
OF_SAMPLES = ("samples", "inputs", "targets")
#: Logged figures that must be equal, beside those of evaluations.
CURVES = ("train/loss", "train/lr")
#: With fewer steps no step is left after the interruption and one before it.
FEWEST_STEPS = 3
#: The signal of each kind of interruption.
SIGNALS = {"kill": "SIGKILL", "stop": "SIGUSR1"}

log = logs.get(__name__)


@dataclass(frozen=True)
class CheckPlan:
    """One interruption: ``how`` is ``kill`` or ``stop``, at ``step`` (None: at random) of a run of ``steps`` steps."""

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


def check(config: str, overrides: Sequence[str], plan: CheckPlan, executor: str = "auto") -> CheckReport:
    """Train twice and compare. Raises JobFailedError when a run ends otherwise than completed."""
    _refuse_impossible(plan)
    loaded = configs.load_config(config, overrides)
    ranks = loaded.cluster.nodes * loaded.cluster.tasks_per_node
    # Several checkpoints within the few steps, unless the user says how often.
    common = [*overrides, f"train.max_steps={plan.steps}"]
    if not any(text.startswith("checkpoint.every_steps=") for text in overrides):
        common.append(f"checkpoint.every_steps={max(1, plan.steps // 6)}")
    common.append(f"checkpoint.keep={max(2, loaded.checkpoint.keep)}")
    undisturbed = _run(config, [*common, f"name={loaded.name}-undisturbed"], {}, executor)
    # A loop of one's own, or few epochs, may end before ``plan.steps``.
    steps = len(read(undisturbed).steps)
    log.info("%s: undisturbed, %d steps on %d ranks", undisturbed.path, steps, ranks)
    strike = _strike(plan, _needed(loaded, ranks), steps)
    plan = replace(plan, step=strike["step"], moving_shares=loaded.data.share == "auto")
    disturbed = _disturb(config, [*common, f"name={loaded.name}-disturbed"], plan, {"strikes": {"1": strike}}, executor)
    return compare(undisturbed, disturbed, plan, f"rank {strike['rank']}, {plan.how}, in step {strike['step']}")


def _needed(config: configs.JobConfig, ranks: int) -> int:
    """Return the number of first ranks whose death ends the attempt.

    A parameter server's workers are not among them.
    """
    return config.strategy.parameter_server.servers if config.strategy.name == "parameter_server" else ranks


def _refuse_impossible(plan: CheckPlan) -> None:
    if plan.how not in SIGNALS:
        raise RequestError(f"resume-check: --how {plan.how}: there is {' and '.join(SIGNALS)}")
    if plan.then_ranks is not None and plan.how != "kill":
        raise RequestError("resume-check: --then-ranks goes with --how kill: a stopped job may come back by itself")
    if plan.steps < FEWEST_STEPS:
        raise RequestError(f"resume-check: {plan.steps} steps are too few; use {FEWEST_STEPS} or more")
    if plan.step is not None and not 0 <= plan.step < plan.steps - 1:
        raise RequestError(f"resume-check: step {plan.step} is not within 0..{plan.steps - 2}")


def _strike(plan: CheckPlan, ranks: int, steps: int) -> dict[str, Any]:
    """Choose rank and step of the interruption, after the first step and before the last.

    Before the first step there is nothing to lose. ``steps`` is how many steps the undisturbed run has made. Raises
    RequestError if they are too few.
    """
    if not steps:
        raise RequestError(
            "resume-check: the script has recorded no step: its training must be a job of the toolkit's, or a loop "
            "over run.steps() of toolkit.start()"
        )
    if steps < FEWEST_STEPS or (plan.step is not None and plan.step >= steps - 1):
        what = f"{FEWEST_STEPS} are needed" if steps < FEWEST_STEPS else f"--at must be within 0..{steps - 2}"
        raise RequestError(
            f"resume-check: the training ended by itself after {steps} of the {plan.steps} steps, and {what}; to make "
            "it longer raise train.epochs, or the number of steps or epochs in the script's own loop"
        )
    seed = random.randrange(10**6) if plan.seed is None else plan.seed
    log.info("seed %d", seed)
    dice = random.Random(seed)
    step = dice.randrange(1, max(2, steps * 3 // 4))  # early enough that steps are left in which to differ
    return {
        "rank": dice.randrange(ranks),
        "step": step if plan.step is None else plan.step,
        "late": dice.random(),
        "signal": SIGNALS[plan.how],
    }


def _run(config: str, overrides: Sequence[str], brief: Mapping[str, Any], executor: str) -> RunDir:
    with _brief(brief):
        run = submit(config, overrides, executor=executor)
    return _completed(run)


def _disturb(config: str, overrides: list[str], plan: CheckPlan, brief: Mapping[str, Any], executor: str) -> RunDir:
    """Run the config with the interruption.

    A killed run comes back by itself. One that was stopped, or goes on with other ranks, is resumed.
    """
    if plan.then_ranks is not None:
        # Without retries a killed run ends, so that it can be resumed with other ranks.
        overrides = [*overrides, "retry.max_failures=0"]
    with _brief(brief):
        run = submit(config, overrides, executor=executor)
        ended = run.wait()
        if ended["state"] in ("stopped", "failed") and len(run.dir.attempts()) == 1:
            if plan.then_ranks is not None:
                _set_ranks(run.dir, plan.then_ranks)
            run = resume(run.dir)
    return _completed(run)


def _set_ranks(run: RunDir, ranks: int) -> None:
    config = configs.load_config(run.config, site=False)
    nodes = config.cluster.nodes
    if ranks % nodes:
        raise RequestError(f"resume-check: {ranks} ranks cannot be shared evenly by {nodes} nodes")
    config.cluster.tasks_per_node = ranks // nodes
    fsio.write_atomic(run.config, configs.dump_config(config))


@contextmanager
def _brief(brief: Mapping[str, Any]) -> Iterator[None]:
    """Set the brief for runs that start inside the context: they inherit our environment."""
    before = os.environ.get(rundir.WITNESS_VARIABLE)
    os.environ[rundir.WITNESS_VARIABLE] = json.dumps(brief)
    try:
        yield
    finally:
        if before is None:
            del os.environ[rundir.WITNESS_VARIABLE]
        else:
            os.environ[rundir.WITNESS_VARIABLE] = before


def _completed(run: Run) -> RunDir:
    run.wait()
    run.result()
    return run.dir


# --------------------------------------------------------------------------------------------------------- comparing


@dataclass(frozen=True)
class WitnessRecord:
    """What the witnesses of one run wrote: by step, a line of each rank that took part, from the latest attempt."""

    steps: Mapping[int, Mapping[int, Mapping[str, Any]]]
    conditions: Sequence[Mapping[str, Any]]


def read(run: RunDir) -> WitnessRecord:
    """Return the record of a run."""
    lines: dict[int, dict[int, Mapping[str, Any]]] = {}
    conditions: list[Mapping[str, Any]] = []
    latest: dict[int, int] = {}
    for path in sorted(run.witness.glob("rank-*.jsonl")):
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
    """Compare the two records, step by step, then the bytes of the last checkpoints and the curves."""
    attempts = disturbed.attempts()
    if len(attempts) < 2:
        raise JobFailedError(
            f"{disturbed.path} ended before the signal of step {plan.step} reached it: choose an earlier step with "
            "--at, or more steps"
        )
    ours, theirs = read(undisturbed), read(disturbed)
    ranks = tuple(dict.fromkeys([attempts[0]["world_size"], attempts[-1]["world_size"]]))
    first, different, worst = None, dict[str, str](), None
    # Every bit must be equal only if the same ranks had the same samples.
    exact = len(ranks) == 1 and not plan.moving_shares
    if not exact:
        worst = _worst_loss(ours, theirs)
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
        resumed_from=attempts[1]["step_start"] or 0,
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
    if not exact:
        found = _samples_that_differ(mine, other)
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
            texts.append(f"rank {rank}{_where(kind, one, two, mine[rank])}")
    return listing(texts, 3)


def _where(kind: str, one: Any, two: Any, line: Mapping[str, Any]) -> str:
    if isinstance(one, dict) and isinstance(two, dict):
        names = [name for name in one.keys() | two.keys() if one.get(name) != two.get(name)]
        return f" ({listing(sorted(names), 2)})"
    if isinstance(one, list) and isinstance(two, list) and len(one) == len(two):
        samples = [line["samples"][i] for i in range(len(one)) if one[i] != two[i]]
        return f" ({len(samples)} of {len(one)} samples, the first of them {samples[0]})"
    if kind == "loss":
        return f" ({float.fromhex(one)!r} and {float.fromhex(two)!r})"
    return f" ({one} and {two})" if kind == "lr" else ""


def _samples_that_differ(mine: Mapping[int, Any], other: Mapping[int, Any]) -> dict[str, str]:
    one, two = _by_position(mine), _by_position(other)
    if one.keys() != two.keys():
        odd = sorted(one.keys() ^ two.keys())
        return {"positions": f"{listing([str(p) for p in odd], 3)} is in one of them only"}
    found = {}
    for index, kind in enumerate(OF_SAMPLES):
        positions = [p for p in one if one[p][index] != two[p][index]]
        if positions:
            found[kind] = f"{len(positions)} of {len(one)} samples, the first of them {one[min(positions)][0]}"
    return found


def _by_position(lines: Mapping[int, Any]) -> dict[int, tuple[Any, ...]]:
    """Return what stands at each position of one global batch, on any rank. Other loaders record no positions."""
    found: dict[int, tuple[Any, ...]] = {}
    for line in lines.values():
        positions = line.get("positions", ())
        columns = [line.get(kind, ()) for kind in OF_SAMPLES]
        # A batch that is no pair has no targets, and one that a collate function has packed has no row for each sample.
        known = [column if len(column) == len(positions) else [None] * len(positions) for column in columns]
        found |= dict(zip(positions, zip(*known, strict=True), strict=True))
    return found


def _deviation(mine: Mapping[int, Any], other: Mapping[int, Any]) -> float:
    one, two = (sum(float.fromhex(line["loss"]) for line in lines.values()) for lines in (mine, other))
    return abs(one - two) / max(abs(one), abs(two), 1e-30)


def _worst_loss(ours: WitnessRecord, theirs: WitnessRecord) -> float:
    both = ours.steps.keys() & theirs.steps.keys()
    return max((_deviation(ours.steps[step], theirs.steps[step]) for step in both), default=0.0)


def _last_checkpoints(one: RunDir, two: RunDir) -> dict[str, str]:
    """Compare every byte of the last checkpoints, verified."""
    stores = [CheckpointStore(run.checkpoints) for run in (one, two)]
    mine, other = (store.verify(store.list()[0]) for store in stores)
    if mine.step != other.step:
        return {"last checkpoint": f"of step {mine.step} and of step {other.step}"}
    names = [n for n in mine.tensors.keys() | other.tensors.keys() if mine.tensors.get(n) != other.tensors.get(n)]
    return {"last checkpoint": listing(sorted(names), 3)} if names else {}


def _curves(one: RunDir, two: RunDir) -> dict[str, str]:
    """Compare TensorBoard's figures that do not depend on the clock.

    Among them are means over steps before and after a resume, and evaluations, for which all ranks' buffers count.
    """
    mine, other = _logged(one), _logged(two)
    odd = sorted(point for point in mine.keys() | other.keys() if mine.get(point) != other.get(point))
    texts = [f"{tag} in step {step} ({mine.get((step, tag))} and {other.get((step, tag))})" for step, tag in odd]
    return {"curves": listing(texts, 3)} if odd else {}


def _logged(run: RunDir) -> dict[tuple[int, str], float]:
    lines = [json.loads(text) for text in (run.tensorboard / "metrics.jsonl").read_text().splitlines()]
    tags = ((line["step"], tag, value) for line in lines for tag, value in line.items())
    return {(step, tag): value for step, tag, value in tags if tag in CURVES or tag.startswith("eval/")}


def _changed(conditions: Sequence[Mapping[str, Any]], but: str | None) -> dict[str, tuple[Any, ...]]:
    """Return the conditions for a resume in every bit that changed during the runs."""
    values = {key: tuple(dict.fromkeys(each.get(key) for each in conditions)) for key in conditions[0]}
    return {key: seen for key, seen in values.items() if len(seen) > 1 and key != but}


# ---------------------------------------------------------------------------------------------------------- the page


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
        lines.append(f"IDENTICAL: {report.steps} steps on {ranks} ranks: {_what_is_identical(report)}")
    lines += [f"  {RECORDED.get(kind, kind)}: {text}" for kind, text in report.different.items()]
    lines += [
        f"not the same all the time: {key} ({listing([str(v) for v in seen], 4)})"
        for key, seen in report.conditions.items()
    ]
    # A difference before the resume is not the resume's fault: say what else it may be.
    if report.first is not None and report.first < report.resumed_from:
        lines.append(
            "that is before the resume: the training draws from something that follows no seed, or an operation"
        )
        lines.append("  does not give the same bits each time (train.deterministic: true refuses those)")
    if report.worst_loss is not None:
        lines += _what_of_the_loss(report, report.worst_loss)
    lines += ["", *(f"{name}: {path}" for name, path in zip(("undisturbed", "disturbed"), report.runs, strict=True))]
    return "\n".join(lines)


def _what_of_the_loss(report: CheckReport, worst: float) -> list[str]:
    equal = f"loss: equal to {worst:.1e} of its value;"
    if report.moving_shares:
        return [
            f"{equal} more is not promised, for the shares follow the ranks' speed (data.share: auto),",
            "  which is another one each time; batch statistics and dropout follow the shares (--tolerance)",
        ]
    return [
        f"{equal} models with batch statistics or dropout draw",
        "  them for each rank, so that another number of ranks is another training (--tolerance)",
    ]


def _what_is_identical(report: CheckReport) -> str:
    if report.worst_loss is not None:
        return "positions, sample ids, inputs (augmentation) and targets of every sample"
    return ", ".join(RECORDED.values()) + ", the bytes of the last checkpoint, and the curves"
