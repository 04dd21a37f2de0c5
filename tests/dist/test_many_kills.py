"""A run that is killed again and again at random moments.

It ends bit for bit like the undisturbed one. CI makes a few kills with a fresh seed, which is printed; ``make soak``
makes 50 for each number of workers.
"""

import json
import multiprocessing
import os
import random
import signal
import threading
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.dist.objectives import cross_entropy
from tests.dist.ranks import in_run, run_ranks
from tests.dist.test_resume_check import Images, judge, model, note_attempt
from toolkit.checkpoint.folder import newest_step
from toolkit.config import CheckpointConfig, JobConfig, OptimConfig, StrategyConfig, TrainConfig
from toolkit.config.learning_rate import build_schedule
from toolkit.data.loader import Loader
from toolkit.data.randomness import seed_for_init
from toolkit.files.run_files import RunResult
from toolkit.files.rundir import TRACE_VARIABLE, RunDir
from toolkit.plugins.site.resume_compare import InterruptionPlan, compare
from toolkit.ranks.session import Session
from toolkit.strategies import build_strategy, criterion_objective
from toolkit.train.loop import Trainer
from toolkit.train.optim import build_optimizer
from toolkit.train.run_checkpoints import Checkpoints
from toolkit.train.saver import identity

pytestmark = [pytest.mark.dist, pytest.mark.chaos]

RANKS, BATCH, SAVE_EVERY = 4, 26, 5  # shares of 6 and 7 samples; 50 samples: epochs end within batches
STEPS_PER_KILL = 12
LONGEST_S = 600.0
SEED = int(os.environ.get("TOOLKIT_SEED", random.randrange(10**6)))


def train(session: Session, run: RunDir, attempt: int, steps: int, workers: int, blow: dict[str, Any] | None) -> Any:
    """One attempt, in which the rank of the ``blow`` is killed by it, if any."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # may have workers
    if blow is not None and "after_s" in blow and session.rank == blow["rank"]:
        threading.Timer(blow["after_s"], os.kill, [os.getpid(), signal.SIGKILL]).start()
    strikes = {} if blow is None or "step" not in blow else {str(attempt): blow}
    os.environ[TRACE_VARIABLE] = json.dumps({"strikes": strikes})
    for seed in (torch.manual_seed, random.seed, np.random.seed):  # as a process that has just started has its own
        seed(attempt)
    session = in_run(session, run.path, attempt)
    config = TrainConfig(epochs=10**6, max_steps=steps, seed=3, log_every=5, eval_every=10)
    seed_for_init(config.seed)
    strategy = build_strategy(StrategyConfig(), session)
    loader = Loader(Images(), global_batch_size=BATCH, seed=3, share=strategy.share, workers=workers)
    optim = OptimConfig("adamw", lr=0.01)
    strategy.build(model, partial(build_optimizer, optim), criterion_objective(cross_entropy), loader.at(0))
    checkpoints = Checkpoints(CheckpointConfig(SAVE_EVERY), session, strategy, identity(JobConfig()))
    schedule = partial(build_schedule, optim)
    result = Trainer(config, session, strategy, loader, schedule=schedule, checkpoints=checkpoints).fit(judge)
    loader.close()
    if blow is not None and session.rank == blow["rank"]:
        signal.pause()  # it was quicker than the blow, which is to come all the same
    return asdict(result)


def random_blow(dice: random.Random, newest: int, steps: int) -> dict[str, Any]:
    """Draw a kill within the steps after the newest checkpoint, some way into a step.

    One in five comes by the clock instead, mostly while the ranks start.
    """
    rank = dice.randrange(RANKS)
    if dice.random() < 0.2:
        return {"rank": rank, "after_s": dice.uniform(0.0, 1.0)}
    step = min(newest + dice.randrange(3 * STEPS_PER_KILL), steps - 2)
    return {"rank": rank, "step": step, "late": dice.random(), "how": "kill"}


def undisturbed(folder: Path, steps: int, workers: int) -> RunDir:
    run = RunDir(folder / "whole")
    run.path.mkdir()
    results = run_ranks(RANKS, train, run, 1, steps, workers, None, limit_s=LONGEST_S)
    note_attempt(run, 1, RANKS, 0)
    run.write_result(RunResult.from_json({"state": "completed", **results[0]}))
    return run


def killed(folder: Path, kills: int, steps: int, workers: int) -> RunDir:
    run, dice = RunDir(folder / "killed"), random.Random(SEED)
    run.path.mkdir()
    for attempt in range(1, kills + 2):
        newest = newest_step(run.checkpoints) or 0
        if attempt > kills:
            results = run_ranks(RANKS, train, run, attempt, steps, workers, None, limit_s=LONGEST_S)
            run.write_result(RunResult.from_json({"state": "completed", **results[0]}))
            note_attempt(run, attempt, RANKS, newest)
            break
        blow = random_blow(dice, newest, steps)
        print(f"attempt {attempt}, from step {newest}: {blow}")
        with pytest.raises(AssertionError, match=r"the process ended without an answer|Connection"):
            run_ranks(RANKS, train, run, attempt, steps, workers, blow, limit_s=LONGEST_S)
        note_attempt(run, attempt, RANKS, newest)
    return run


@pytest.mark.parametrize(
    ("kills", "workers"),
    [
        pytest.param(4, 1, id="4 kills"),
        *(pytest.param(50, n, id=f"50 kills, {n} workers", marks=pytest.mark.soak) for n in (0, 1, 2)),
    ],
)
def test_a_run_killed_at_random_moments_ends_bit_for_bit_like_the_undisturbed_one(
    tmp_path: Path, kills: int, workers: int
) -> None:
    """Compare states after every step that counts, the last checkpoint's bytes, and the curves."""
    print(f"TOOLKIT_SEED={SEED}")
    steps = STEPS_PER_KILL * kills
    report = compare(
        undisturbed(tmp_path, steps, workers),
        killed(tmp_path, kills, steps, workers),
        InterruptionPlan(steps, struck=(f"{kills} kills",)),
    )
    assert (report.first, report.different, report.conditions) == (None, {}, {})
    assert report.steps == steps
