"""How a run without a result stands. Before, listings and handles judged by rules of their own, which differed."""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from toolkit.base.procfs import ProcessIdentity
from toolkit.cli import run_rows
from toolkit.files import rundir
from toolkit.files.run_files import OwnerRecord, RunState, RunStatus, Submission
from toolkit.files.rundir import RunDir
from toolkit.run.records.submitted_run import SubmittedRun
from toolkit.slurm.jobs import JobStatus

Answers = Mapping[str, JobStatus | None]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = rundir.create("test", tmp_path)
    run.config.write_text("name: test\n")
    return run


def owned(run: RunDir, age_s: float, *jobs: str, state: RunState = RunState.RUNNING) -> None:
    then = time.time() - age_s
    run.write_owner(OwnerRecord(1, "t", "slurm", "node1", 1, then, jobs=jobs[:1], follow_ups=jobs[1:], serves=True))
    run.write_status(RunStatus(state, job_id=jobs[0], updated=then))


def shown(run: RunDir, monkeypatch: pytest.MonkeyPatch, answers: Answers) -> str:
    monkeypatch.setattr(run_rows, "ask_slurm", lambda ids: {id_: answers[id_] for id_ in ids if id_ in answers})
    return str(run_rows.status_rows([run])[0].state)


def ended(job: str) -> JobStatus:
    return JobStatus(job, "FAILED")


@pytest.mark.parametrize(
    ("age_s", "jobs", "answers", "state", "is_over"),
    [
        pytest.param(400, "7", {"7": ended("7")}, "lost (FAILED)", True, id="its job has ended"),
        pytest.param(400, "7", {"7": None}, "lost", True, id="a job that Slurm has forgotten"),
        pytest.param(60, "7", {"7": None}, "running? (silent)", True, id="perhaps of another cluster"),
        pytest.param(400, "7", {}, "running? (silent)", False, id="no answer"),
        pytest.param(400, "78", {"7": ended("7")}, "running? (silent)", False, id="a follow-up job is newer"),
        pytest.param(400, "78", {"7": ended("7"), "8": None}, "lost (FAILED)", True, id="and is known to be gone"),
        pytest.param(
            400, "78", {"7": ended("7"), "8": JobStatus("8", "PENDING")}, "running (PENDING)", False, id="and waits"
        ),
    ],
)
def test_a_listing_and_a_handle_judge_by_the_same_answer(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, age_s: float, jobs: str, answers: Answers, state: str, is_over: bool
) -> None:
    owned(run, age_s, *jobs)
    assert shown(run, monkeypatch, answers) == state
    handle = SubmittedRun(run, "slurm", jobs[0])
    assert handle.is_over(lambda ids: {id_: answers[id_] for id_ in ids if id_ in answers}) == is_over


def me() -> ProcessIdentity:
    return ProcessIdentity.of(os.getpid())


@pytest.mark.parametrize(
    ("process", "state"), [(me, "queued? (silent)"), (lambda: ProcessIdentity.of(2**22 + 1), "lost")]
)
def test_a_local_run_is_not_lost_while_its_submission_works(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, process: Callable[[], ProcessIdentity], state: str
) -> None:
    """Before, the listing went by the supervisor's process alone, and called such a run lost after 30 s."""
    then, starter = time.time() - 400, process()
    run.write_owner(OwnerRecord(1, "t", "local", starter.host, starter.pid, then))
    run.write_submission(
        Submission(executor="local", job_id=str(starter.pid), host=me().host, time=then, token="t", birth=starter.birth)
    )
    run.write_status(RunStatus(RunState.QUEUED, updated=then))
    assert shown(run, monkeypatch, {}) == state
    assert SubmittedRun(run, "local", str(starter.pid)).is_over() == (state == "lost")
