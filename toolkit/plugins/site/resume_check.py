"""`toolkit resume-check`: compares a killed and resumed run of a config with an undisturbed one.

The config is trained for some steps twice. The second run is interrupted and comes back as it always does: once within
the first epoch, once within a later one and once at an epoch's end, where the steps have these, each time in a random
step soon after a checkpoint. In both runs `toolkit.train.step_digests` records what every rank was given and computed
in every step, and the records are compared.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit import config as configs
from toolkit.base import fsio, logs
from toolkit.base.errors import JobFailedError, RequestError, ToolkitError
from toolkit.config.script_keys import acting_keys
from toolkit.files import rundir
from toolkit.files.run_files import RunState
from toolkit.files.rundir import RunDir
from toolkit.plugins.site.resume_compare import InterruptionPlan, ResumeCheckReport, compare, read, resume_points
from toolkit.run.prepare.new_run import load
from toolkit.run.submission.executors import choose_executor
from toolkit.run.submission.handle import Run
from toolkit.run.submission.resume_run import resume
from toolkit.run.submission.submit import submit, submit_like

#: With fewer steps no step is left after the interruption and one before it.
FEWEST_STEPS = 3
#: An interruption comes this many steps at most after the checkpoint from which the run then continues.
FARTHEST = 3
#: The kinds of interruption; see `toolkit.train.step_digests`.
HOW = ("kill", "stop", "preempt")

_NO_STEP = (
    "its training must be a job of the toolkit's, or a loop over run.steps() of toolkit.start(); a library's own loop "
    "is not recorded"
)

log = logs.get(__name__)


def check(config: str, overrides: Sequence[str], plan: InterruptionPlan, executor: str = "auto") -> ResumeCheckReport:
    """Train twice and compare. Raises JobFailedError unless both runs complete. After Ctrl-C no run is left."""
    made: list[Run] = []
    try:
        return _check(config, overrides, plan, executor, made)
    except KeyboardInterrupt:
        for run in made:
            log.warning("run %s is ended and removed", run.id)
            with suppress(ToolkitError):
                run.cancel()
                run.wait()
            remove(run.dir.path)
        raise


def _check(
    config: str, overrides: Sequence[str], plan: InterruptionPlan, executor: str, made: list[Run]
) -> ResumeCheckReport:
    """Do the work of :func:`check`, and note the runs that are ``made`` for it."""
    if plan.how not in HOW:
        raise RequestError(f"--how: unknown value {plan.how!r}; valid: {', '.join(HOW)}")
    if plan.how == "preempt" and choose_executor(executor) != "slurm":
        raise RequestError("resume-check: --how preempt has Slurm requeue the job, and this is to run without it")
    if plan.then_ranks is not None and plan.how != "kill":
        raise RequestError("resume-check: --then-ranks goes with --how kill: a stopped job may come back by itself")
    if plan.steps < FEWEST_STEPS:
        raise RequestError(f"--steps: {plan.steps} is out of range; must be {FEWEST_STEPS} or more")
    if plan.step is not None and not 0 < plan.step < plan.steps - 1:
        raise RequestError(f"--at: {plan.step} is out of range; must be between 1 and {plan.steps - 2}")
    loaded = load(config, overrides, Path.cwd())
    # A main(config) that takes no number of steps makes none of the toolkit's.
    if not configs.uses_toolkit_steps(loaded.job) or not acting_keys(loaded.job, ()).has_effect("train.max_steps"):
        raise RequestError(f"resume-check: {config}: {_NO_STEP}")
    if plan.then_ranks is not None and plan.then_ranks % loaded.cluster.nodes:
        raise RequestError(
            f"resume-check: {plan.then_ranks} ranks cannot be shared evenly by {loaded.cluster.nodes} nodes"
        )
    ranks = loaded.cluster.ranks
    common = [*overrides, f"train.max_steps={plan.steps}", f"checkpoint.keep={max(2, loaded.checkpoint.keep)}"]
    # The runs are saved where the resumes shall begin, unless the user says how often.
    is_given = any(text.startswith("checkpoint.every_steps=") for text in overrides)
    every = loaded.checkpoint.every_steps if is_given else None
    if not is_given:
        common.append("checkpoint.every_steps=null")
    with environment_set(**{rundir.TRACE_VARIABLE: "{}"}):
        run = submit(config, [*common, f"name={loaded.name}-undisturbed"], executor=executor)
    _note(run, made)
    undisturbed = _completed(run)
    # A loop of one's own, or few epochs, may end before ``plan.steps``.
    record = read(undisturbed)
    log.info("%s: undisturbed, %d steps on %d ranks", undisturbed.path, len(record.steps), ranks)
    try:
        seed = random.randrange(10**6) if plan.seed is None else plan.seed
        log.info("seed %d", seed)
        fewest = min(ranks, plan.then_ranks or ranks)
        strikes = choose_interruptions(
            plan, fewest, resume_points(record), len(record.steps), every, random.Random(seed)
        )
    except RequestError:
        remove(undisturbed.path)
        raise
    struck = tuple(f"rank {strike['rank']}, {plan.how}, in step {strike['step']}" for strike in strikes)
    plan = replace(plan, struck=struck, moving_shares=loaded.data.balance == "auto")
    brief: dict[str, Any] = {"strikes": {str(attempt): strike for attempt, strike in enumerate(strikes, 1)}}
    if not isinstance(every, int):
        brief["saves"] = [strike["saved"] for strike in strikes]
    # A killed run comes back by itself, unless it continues with other ranks: then each attempt is resumed.
    # An attempt may die before its supervisor has heard of a step.
    retries = 0 if plan.then_ranks is not None else max(loaded.retry.max_failures, len(strikes))
    common += [f"retry.max_failures={retries}", f"retry.no_progress_attempts={len(strikes) + 2}"]
    common.append(f"name={loaded.name}-disturbed")
    disturbed = _disturb(config, common, plan, brief, executor, undisturbed, made)
    try:
        return compare(undisturbed, _completed(disturbed), plan)
    except JobFailedError as error:
        # What a resume has lost may be what the run failed of: a step that differs before its end says so.
        if len(disturbed.dir.attempts()) > 1:
            report = compare(undisturbed, disturbed.dir, plan)
            if report.first is not None and "step" not in report.different:
                return replace(report, different={**report.different, "end": str(error)})
        raise


def choose_interruptions(
    plan: InterruptionPlan,
    ranks: int,
    places: Mapping[int, str],
    steps: int,
    every: int | str | None,
    dice: random.Random,
) -> list[dict[str, Any]]:
    """Choose the interruptions of the attempts: one for each place at which a resume can begin, or the plan's own.

    Each comes after a checkpoint of ``saved`` steps, in a step that the attempt before did not reach. ``places`` are
    those of the ``steps`` that the undisturbed run has made. If ``every`` is a number, it is saved every so many steps.
    Raises RequestError if there are too few.
    """
    if not steps:
        raise RequestError(f"resume-check: the script has recorded no step: {_NO_STEP}")
    if steps < FEWEST_STEPS or (plan.step is not None and plan.step >= steps - 1):
        what = f"{FEWEST_STEPS} are needed" if steps < FEWEST_STEPS else f"--at must be within 1..{steps - 2}"
        raise RequestError(
            f"resume-check: the training ended by itself after {steps} of the {plan.steps} steps, and {what}; to make "
            "it longer raise train.epochs, or the number of steps or epochs in the script's own loop"
        )
    last = steps - 2 if plan.step is None else plan.step
    saved = [step for step in range(1, last + 1) if not isinstance(every, int) or step % every == 0]
    if plan.step is not None:
        # How often the user has it saved, on disk and in memory, is the user's then.
        chosen = [0 if isinstance(every, int) else dice.choice(saved[-FARTHEST:])]
    elif not saved:
        raise RequestError(
            f"resume-check: checkpoint.every_steps={every}: no checkpoint of these {steps} steps comes before a kill; "
            "leave it out, make it smaller, or say --at STEP"
        )
    else:
        chosen = []
        for place in dict.fromkeys(places.values()):
            # The steps between two of them leave room for the kill.
            free = [step for step in saved if places[step] == place]
            apart = [step for step in free if all(abs(step - other) > FARTHEST for other in chosen)]
            if apart or free:
                chosen.append(dice.choice(apart or free))
    strikes = []
    for begun, following in zip(sorted({*chosen}), [*sorted({*chosen})[1:], steps - 1], strict=True):
        step = dice.randint(begun, max(begun, min(begun + FARTHEST, following) - 1)) if plan.step is None else plan.step
        where = {"rank": dice.randrange(ranks), "step": step, "saved": begun, "late": dice.random()}
        strikes.append({**where, "how": plan.how})
    return strikes


def _disturb(
    config: str,
    overrides: list[str],
    plan: InterruptionPlan,
    brief: Mapping[str, Any],
    executor: str,
    like: RunDir,
    made: list[Run],
) -> Run:
    """Run the config with the interruptions. Only a killed run with the same ranks comes back by itself."""
    interrupted = RunState.STOPPED if plan.then_ranks is None else RunState.FAILED
    with environment_set(**{rundir.TRACE_VARIABLE: json.dumps(brief)}):
        run = submit_like(like, config, overrides, executor)
        _note(run, made)
        for attempt in range(1, len(plan.struck) + 1):
            ended = run.wait()
            if ended["state"] != interrupted or len(run.dir.attempts()) != attempt:
                break
            if plan.then_ranks is not None and attempt == 1:
                changed = configs.load_config(run.dir.config, site=False)
                cluster = changed.cluster
                cluster.tasks_per_node, cluster.components = plan.then_ranks // cluster.nodes, []
                fsio.write_atomic(run.dir.config, configs.dump_config(changed))
            run = resume(run.dir)
    return run


def _note(run: Run, made: list[Run]) -> None:
    """Note a run of the check. By the folder it is known as one before its ranks have started."""
    made.append(run)
    fsio.make_dir(run.dir.trace, parents=0)


def remove(run: Path) -> None:
    """Remove a run that is no longer needed, and the folder of its name."""
    with suppress(OSError):
        RunDir(run).remove()
        run.parent.rmdir()


@contextmanager
def environment_set(**values: str) -> Iterator[None]:
    """Set variables for runs that start inside the context: they inherit our environment."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _completed(run: Run) -> RunDir:
    run.wait()
    run.result()
    return run.dir
