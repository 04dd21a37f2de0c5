"""Bringing a job back, with a Slurm that refuses."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from toolkit import rundir
from toolkit.errors import SlurmError, SlurmRefusedError
from toolkit.launch import outages
from toolkit.launch.job import requeue
from toolkit.launch.job.allocation import Allocation
from toolkit.launch.job.fate import JobFate
from toolkit.launch.job.nodes import Nodes
from toolkit.launch.job.requeue import JobRequeue
from toolkit.launch.record import stop_request
from toolkit.launch.record.stop_request import Intent
from toolkit.rundir import RunDir
from toolkit.slurm.fake import FakeSlurm


class Refusing(FakeSlurm):
    """Refuses to requeue. A moment later Slurm does it itself, or ends the job for good."""

    def __init__(self, *, comes_back: bool) -> None:
        super().__init__()
        self.comes_back = comes_back
        self.asked = 0

    def requeue(self, job_id: str, *, if_running: bool = False) -> None:
        raise SlurmRefusedError("Job/step already completing or completed")

    def show_job(self, job_id: str):  # type: ignore[no-untyped-def]
        self.asked += 1
        if self.asked == 2:
            if self.comes_back:
                super().requeue(job_id)
            else:
                self.advance(1)
        return super().show_job(job_id)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return rundir.create("test", tmp_path)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outages, "RETRY_EVERY_S", 0.01)
    monkeypatch.setattr(requeue, "ENDING_S", 0.1)


def requeued(run: RunDir, slurm: FakeSlurm) -> JobFate:
    """Return the fate of a job that has just started and is requeued."""
    job = slurm.sbatch(["job.sh"])
    slurm.start(job)
    allocation = Allocation(("node1",), (1,), 1, job_id=job)
    return JobRequeue(run, allocation, slurm, Nodes(run, allocation, spare=0, allow_fewer=False)).requeue()


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_refused_requeue_may_mean_that_slurm_does_it_itself(run: RunDir, comes_back: bool) -> None:
    slurm = Refusing(comes_back=comes_back)
    assert (requeued(run, slurm) is JobFate.REQUEUED) is comes_back


class CancelledMeanwhile(FakeSlurm):
    """A Slurm where a user cancels the job just when its requeue is asked for.

    The first ``lost`` requests fail: scancel's SIGTERM kills the scontrol of the request as well.
    """

    def __init__(self, lost: int) -> None:
        super().__init__()
        self.lost = lost

    def requeue(self, job_id: str, *, if_running: bool = False) -> None:
        if self._one(job_id).state == "RUNNING":
            self.cancel(job_id)
        self.lost -= 1
        if self.lost >= 0:
            raise SlurmError("`scontrol requeue` failed with exit code -15")
        super().requeue(job_id, if_running=if_running)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_job_that_is_cancelled_before_its_requeue_stays_cancelled(run: RunDir, lost: int) -> None:
    """Before, a plain requeue brought it back, at once or at the next request."""
    slurm = CancelledMeanwhile(lost)
    assert requeued(run, slurm) is JobFate.CANCELLED
    row = slurm.show_job("1")
    assert row is not None
    assert (row.state, row.restarts) == ("COMPLETING", 0)


@pytest.mark.parametrize("wanted", list(Intent))
def test_a_run_that_a_user_has_ended_is_not_requeued(run: RunDir, wanted: Intent) -> None:
    stop_request.ask(run, wanted)
    slurm = FakeSlurm()
    assert requeued(run, slurm) is JobFate.CANCELLED
    row = slurm.show_job("1")
    assert row is not None
    assert row.restarts == 0


@pytest.mark.parametrize("failures", [1, 3])
def test_a_file_server_that_is_away_for_a_moment_does_not_prevent_a_requeue(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    errors = [OSError(errno.EIO, "Input/output error")] * failures

    def asked(run: RunDir) -> None:
        if errors:
            raise errors.pop()

    monkeypatch.setattr(stop_request, "asked", asked)
    assert requeued(run, FakeSlurm()) is JobFate.REQUEUED
    assert not errors


def test_a_job_that_a_preemption_is_ending_is_requeued_all_the_same(run: RunDir) -> None:
    """Slurm leaves such a job alone when asked to requeue running jobs only."""

    class Preempting(FakeSlurm):
        def start(self, job_id: str, node_list: str = "node1") -> None:
            super().start(job_id, node_list)
            self.preempt(job_id)
            self.advance(0)

    slurm = Preempting(preempt_mode="CANCEL")
    assert requeued(run, slurm) is JobFate.REQUEUED
