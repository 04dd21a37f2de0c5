"""When a job of Slurm is nearly over, and which signal of it is Slurm's announcement."""

import signal
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from toolkit.nodes.allocation import Allocation
from toolkit.run.job.slurm_job import SlurmJob
from toolkit.slurm.jobs import JobRow

ALLOCATION = Allocation(("n1",), (1,), 1, job_id="1")


def two_hours(left_s: float) -> JobRow:
    return JobRow(job_id="1", state="RUNNING", end_time=time.time() + left_s, time_limit_s=7200.0)


def test_before_the_limit_two_saves_have_room_beside_a_minute() -> None:
    job = SlurmJob(None, ALLOCATION, 0.0)
    job.row = two_hours(90.0)
    assert not job.is_nearly_over(10.0)
    assert job.is_nearly_over(20.0)


def test_a_limit_that_was_raised_meanwhile_stops_nobody() -> None:
    raised = two_hours(3600.0)
    slurm: Any = SimpleNamespace(show_job=lambda job: raised)
    job = SlurmJob(slurm, ALLOCATION, 0.0)
    job.row = replace(raised, end_time=time.time() + 5.0)
    assert not job.is_nearly_over_still(0.0)


def test_slurms_signal_may_come_a_minute_early() -> None:
    for early_s, is_slurms in ((60.0, True), (90.0, False)):
        job = SlurmJob(None, ALLOCATION, 120.0)
        job.row = two_hours(120.0 + early_s)
        assert job.takes_limit_signal(signal.SIGUSR2) is is_slurms
