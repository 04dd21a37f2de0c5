"""Bringing a job back, with a Slurm that refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit import rundir
from toolkit.cluster.fake import FakeSlurm
from toolkit.errors import SlurmRefusedError
from toolkit.launch import patience
from toolkit.launch.allocation import Allocation
from toolkit.launch.comeback import Comeback
from toolkit.launch.nodes import Nodes
from toolkit.rundir import RunDir


class Refusing(FakeSlurm):
    """Refuses to requeue, and does it itself a moment later, or ends the job for good."""

    def __init__(self, *, comes_back: bool) -> None:
        super().__init__()
        self.comes_back = comes_back
        self.asked = 0

    def requeue(self, job_id: str) -> None:
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


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_refused_requeue_may_mean_that_slurm_does_it_itself(
    run: RunDir, comes_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "RETRY_EVERY_S", 0.01)
    slurm = Refusing(comes_back=comes_back)
    job = slurm.sbatch(["job.sh"])
    slurm.start(job)
    slurm.cancel(job)
    allocation = Allocation(("node1",), (1,), 1, job_id=job)
    nodes = Nodes(run, allocation, spare=0, allow_fewer=False)
    assert Comeback(run, allocation, slurm, nodes).requeue() is comes_back
