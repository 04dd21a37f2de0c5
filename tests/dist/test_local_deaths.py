"""A killed worker of a parameter server on this machine: the run starts again, as after any rank's death."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from tests.dist.test_local_runs import END_S, ROOT, TOOLKIT, ranks, reached, the_run
from tests.waiting import PATIENCE

pytestmark = pytest.mark.dist

OVERRIDES = ["train.epochs=60", "train.eval_every=500", "checkpoint.every_steps=50"]


def test_a_killed_worker_is_named_and_the_run_goes_on_from_its_checkpoint(env: dict[str, str]) -> None:
    argv = [*TOOLKIT, "submit", "configs/digits_parameter_server.yaml", "--executor", "local", "--wait", *OVERRIDES]
    with subprocess.Popen(argv, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as process:
        run = the_run(env)
        reached(run, 60)
        os.kill(ranks(env)[1], signal.SIGKILL)
        out, _ = process.communicate(timeout=PATIENCE * END_S)
    assert process.returncode == 0, out
    first, second = run.attempts()
    assert (first.cause, first.decision, first.first_failure.rank) == ("crashed", "restart", 1)
    assert first.first_failure.how == "killed by SIGKILL"
    assert (second.cause, second.step_start >= 50) == ("completed", True)
