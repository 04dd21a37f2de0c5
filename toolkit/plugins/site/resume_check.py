"""`toolkit resume-check`: compares a killed and resumed run of a config with an undisturbed one.

The config is trained for some steps twice. The second run is interrupted in a random place and comes back as it always
does. In both runs `toolkit.plugins.profile.trace` records what every rank was given and computed, in every step.
The two records are compared, by the first step in which they differ.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from toolkit import config as configs
from toolkit.base import fsio, logs
from toolkit.base.errors import RequestError
from toolkit.files import rundir
from toolkit.files.run_files import RunState
from toolkit.files.rundir import RunDir
from toolkit.plugins.site.resume_compare import compare, read
from toolkit.plugins.site.resume_report import CheckPlan, CheckReport
from toolkit.run.submission.handle import Run
from toolkit.run.submission.resume import resume
from toolkit.run.submission.submit import submit

#: With fewer steps no step is left after the interruption and one before it.
FEWEST_STEPS = 3
#: The signal of each kind of interruption.
SIGNALS = {"kill": "SIGKILL", "stop": "SIGUSR1"}

log = logs.get(__name__)


def check(config: str, overrides: Sequence[str], plan: CheckPlan, executor: str = "auto") -> CheckReport:
    """Train twice and compare. Raises JobFailedError when a run ends otherwise than completed."""
    if plan.how not in SIGNALS:
        raise RequestError(f"resume-check: --how {plan.how}: there is {' and '.join(SIGNALS)}")
    if plan.then_ranks is not None and plan.how != "kill":
        raise RequestError("resume-check: --then-ranks goes with --how kill: a stopped job may come back by itself")
    if plan.steps < FEWEST_STEPS:
        raise RequestError(f"resume-check: {plan.steps} steps are too few; use {FEWEST_STEPS} or more")
    if plan.step is not None and not 0 <= plan.step < plan.steps - 1:
        raise RequestError(f"resume-check: step {plan.step} is not within 0..{plan.steps - 2}")
    loaded = configs.load_config(config, overrides)
    ranks = loaded.cluster.ranks
    # Several checkpoints within the few steps, unless the user says how often.
    common = [*overrides, f"train.max_steps={plan.steps}"]
    if not any(text.startswith("checkpoint.every_steps=") for text in overrides):
        common.append(f"checkpoint.every_steps={max(1, plan.steps // 6)}")
    common.append(f"checkpoint.keep={max(2, loaded.checkpoint.keep)}")
    with _brief({}):
        run = submit(config, [*common, f"name={loaded.name}-undisturbed"], executor=executor)
    undisturbed = _completed(run)
    # A loop of one's own, or few epochs, may end before ``plan.steps``.
    steps = len(read(undisturbed).steps)
    log.info("%s: undisturbed, %d steps on %d ranks", undisturbed.path, steps, ranks)
    strike = _strike(plan, ranks, steps)
    plan = replace(plan, step=strike["step"], moving_shares=loaded.data.share == "auto")
    common.append(f"name={loaded.name}-disturbed")
    disturbed = _disturb(config, common, plan, {"strikes": {"1": strike}}, executor)
    struck = f"rank {strike['rank']}, {plan.how}, in step {strike['step']}"
    return compare(undisturbed, disturbed, plan, struck)


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


def _disturb(config: str, overrides: list[str], plan: CheckPlan, brief: Mapping[str, Any], executor: str) -> RunDir:
    """Run the config with the interruption.

    A killed run comes back by itself. One that was stopped, or goes on with other ranks, is resumed.
    """
    ranks = plan.then_ranks
    if ranks is not None:
        # Without retries a killed run ends, so that it can be resumed with other ranks.
        overrides = [*overrides, "retry.max_failures=0"]
    with _brief(brief):
        run = submit(config, overrides, executor=executor)
        ended = run.wait()
        if ended["state"] in (RunState.STOPPED, RunState.FAILED) and len(run.dir.attempts()) == 1:
            if ranks is not None:
                changed = configs.load_config(run.dir.config, site=False)
                nodes = changed.cluster.nodes
                if ranks % nodes:
                    raise RequestError(f"resume-check: {ranks} ranks cannot be shared evenly by {nodes} nodes")
                changed.cluster.tasks_per_node, changed.cluster.components = ranks // nodes, []
                fsio.write_atomic(run.dir.config, configs.dump_config(changed))
            run = resume(run.dir)
    return _completed(run)


@contextmanager
def _brief(brief: Mapping[str, Any]) -> Iterator[None]:
    """Set the brief for runs that start inside the context: they inherit our environment."""
    before = os.environ.get(rundir.TRACE_VARIABLE)
    os.environ[rundir.TRACE_VARIABLE] = json.dumps(brief)
    try:
        yield
    finally:
        if before is None:
            del os.environ[rundir.TRACE_VARIABLE]
        else:
            os.environ[rundir.TRACE_VARIABLE] = before


def _completed(run: Run) -> RunDir:
    run.wait()
    run.result()
    return run.dir
