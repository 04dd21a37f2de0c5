"""A killed worker of a parameter server on this machine.

The run goes on and reports the death, until the last worker dies.
"""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from tests.dist.test_local_runs import END_S, ROOT, TOOLKIT, ranks, reached, the_run
from tests.waiting import PATIENCE, wait_for

pytestmark = pytest.mark.dist

#: Long enough to be struck twice.
OVERRIDES = ["train.epochs=60", "train.eval_every=500", "checkpoint.every_steps=50"]


def start(env: dict[str, str], *overrides: str) -> subprocess.Popen[str]:
    argv = [*TOOLKIT, "submit", "configs/digits_parameter_server.yaml", "--executor", "local", "--wait", *OVERRIDES]
    return subprocess.Popen([*argv, *overrides], cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)


def test_a_killed_worker_is_named_and_the_attempt_goes_on_until_the_last_one_dies(env: dict[str, str]) -> None:
    with start(env) as process:
        run = the_run(env)
        reached(run, 20)
        os.kill(ranks(env)[1], signal.SIGKILL)
        status = wait_for(lambda: run.status() if run.status().lost_ranks else None, 10, "the lost rank")
        assert status.lost_ranks == {"1": "killed by SIGKILL"}
        shown = subprocess.run(
            [*TOOLKIT, "status", run.id], cwd=ROOT, env=env, capture_output=True, text=True, check=True
        )
        assert "rank 1 died (killed by SIGKILL); the run went on without it" in shown.stdout
        reached(run, status.progress.step + 60)
        os.kill(ranks(env)[2], signal.SIGKILL)  # the last worker
        out, _ = process.communicate(timeout=PATIENCE * END_S)
    assert process.returncode == 0, out
    first, second = run.attempts()
    assert (first.cause, first.decision, first.first_failure.rank) == ("crashed", "restart", 2)
    assert first.lost_ranks == {"1": "killed by SIGKILL"}
    assert (second.cause, second.lost_ranks) == ("completed", {})
    assert second.step_start >= 50
    assert "rank 1 has died" in run.rank_log(1, 0).read_text()
