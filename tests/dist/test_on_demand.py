"""What a user asks of ranks while they run, on this machine: their stacks, other values, a profile."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.dist.test_local_hangs import hangs_itself
from tests.dist.test_local_hangs import start as start_hanging
from tests.dist.test_local_runs import END_S, TOOLKIT, the_run
from tests.waiting import PATIENCE, wait_for
from toolkit.rundir import RunDir

pytestmark = pytest.mark.dist


def ask(env: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*TOOLKIT, *words], env=env, capture_output=True, text=True, check=False)


def stacks_of(env: dict[str, str], run: RunDir) -> dict[tuple[int, ...], dict[str, Any]]:
    """The groups of `toolkit stacks` by their ranks."""
    done = ask(env, "stacks", run.id, "--json")
    assert done.returncode == 0, done.stderr
    return {tuple(group["ranks"]): group for group in json.loads(done.stdout)["groups"]}


def test_stacks_show_what_each_rank_of_a_deadlock_does_and_disturb_none(env: dict[str, str], tmp_path: Path) -> None:
    """The supervisor finds the same hang later, by stacks that are no older than it."""
    with start_hanging(env, tmp_path, "collective") as process:
        run = the_run(env)
        rank = hangs_itself(env, run)

        def all_wait() -> bool:
            groups = stacks_of(env, run)
            others = tuple(other for other in range(3) if other != rank)
            return "in all_reduce" in groups.get(others, {}).get("doing", "")

        wait_for(all_wait, END_S, "ranks that wait in one all_reduce")
        hung = stacks_of(env, run)[rank,]
        assert (hung["doing"], hung["stack"][0].endswith("in hang_for_ever")) == ("in a step", True)
        text = ask(env, "stacks", run.id).stdout
        assert f"rank {rank}: in a step" in text
        assert "2 ranks: " in text
        assert ask(env, "stacks", run.id, "--rank", "7").returncode == 2
        out, _ = process.communicate(timeout=PATIENCE * END_S)
    assert process.returncode == 0, out
    first, _ = run.attempts()
    assert (first.cause, first.first_failure and first.first_failure.rank) == ("hang", rank)
    done = ask(env, "stacks", run.id)
    assert (done.returncode, done.stdout) == (2, "")
    assert "has ended (completed)" in done.stderr
