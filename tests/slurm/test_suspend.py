"""Jobs that Slurm suspends for a while: for others (``PreemptMode=SUSPEND``), or by an administrator's ``scontrol``."""

import contextlib
import time
from collections.abc import Iterator

import pytest

from tests.slurm.site import END_S, START_S, Site, nothing_lost, reached
from tests.slurm.test_stop import completed, slow_project, submit
from tests.waiting import wait_for
from toolkit.files.run_files import RunState
from toolkit.files.rundir import RunDir

pytestmark = [pytest.mark.slurm, pytest.mark.sample(1)]

#: Longer than the silence after which a rank counts as hung or a node as lost, where none of them is suspended.
AWAY_S = 30.0


#: How Slurm holds a job up, and has it continue.
HOW = {
    "SUSPENDED": (["scontrol", "suspend"], ["scontrol", "resume"], "when Slurm resumes it"),
    "STOPPED": (["scancel", "--signal=STOP"], ["scancel", "--signal=CONT"], "after `scancel --signal=CONT {}`"),
}


@contextlib.contextmanager
def suspended(site: Site, run: RunDir, state: str) -> Iterator[None]:
    """Have Slurm hold the run's job up in the block, and for ``AWAY_S`` at least."""
    job = site.job_of(run)
    hold, go_on, _ = HOW[state]
    site.box.run([*hold, job])
    until = time.monotonic() + AWAY_S
    yield
    step = run.status().progress.step
    time.sleep(max(0.0, until - time.monotonic()))
    assert run.status().progress.step == step
    site.box.run([*go_on, job])


def told_of(site: Site, run: RunDir, words: str) -> str:
    """What status tells of a run, once it has the words."""
    told = site.run("toolkit", "status", run.id)
    return told if words in told else ""


@pytest.mark.parametrize("state", HOW)
def test_a_suspended_run_goes_on_as_if_nothing_had_been(site: Site, state: str) -> None:
    run = submit(site, slow_project(site, 0.02), "train.max_steps=600", "dist.timeout_s=50")
    reached(run, 50)
    with suspended(site, run, state):
        told = wait_for(lambda: told_of(site, run, f"running ({state})"), 20, "a new answer of Slurm's")
        assert f"and the run continues {HOW[state][2].format(site.job_of(run))}" in told
    assert completed(site, run).step == 600
    assert [attempt.cause for attempt in run.attempts()] == ["completed"]
    assert state not in site.run("toolkit", "status", run.id)


@pytest.mark.parametrize("state", HOW)
def test_a_run_that_is_stopped_while_it_is_suspended_stops_when_it_is_resumed(site: Site, state: str) -> None:
    run = submit(site, slow_project(site, 0.02), "train.max_steps=100000", "train.epochs=20000")
    reached(run, 50)
    with suspended(site, run, state):
        asked = time.monotonic()
        told = site.run("toolkit", "stop", run.id)
        assert time.monotonic() - asked < 20  # scancel would wait for 30 s
        assert "asked to commit a checkpoint and end" in told
        assert run.result() is None
    result = wait_for(run.result, END_S, "a result")
    assert result.state == "stopped"
    nothing_lost(run)
    site.run("toolkit", "resume", run.id, f"train.max_steps={(result.step or 0) + 50}")
    wait_for(lambda: (found := run.result()) is not None and found.state == "completed", END_S, "the end")
    nothing_lost(run)


def test_a_run_that_is_stopped_while_suspended_before_its_first_step_ends_at_once(site: Site) -> None:
    run = submit(site, slow_project(site, 0.02))
    wait_for(lambda: run.status().state == RunState.STARTING, START_S, "its supervisor")
    site.box.run(["scontrol", "suspend", site.job_of(run)])
    site.run("toolkit", "stop", run.id)
    result = wait_for(run.result, START_S, "a result")
    assert result.state == "stopped"
    site.run("toolkit", "resume", run.id, "train.max_steps=50")
    wait_for(lambda: (found := run.result()) is not None and found.state == "completed", END_S, "the end")
