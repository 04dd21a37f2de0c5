"""Bringing a job back, with a Slurm that refuses."""

import errno
from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import Mock

import pytest

from tests.process_limits import ChangeLimits
from toolkit.base import outages
from toolkit.base.errors import SlurmError, SlurmRefusedError, ToolkitError
from toolkit.config import JobConfig
from toolkit.files.run_files import RunState, RunStatus
from toolkit.files.rundir import RunDir
from toolkit.nodes.allocation import Allocation
from toolkit.plugins.testing.fake_slurm import FakeSlurm
from toolkit.run.job.nodes import BadNode, Nodes
from toolkit.run.job.slurm_job import JobOutcome, outcome_of_row
from toolkit.run.records import user_requests
from toolkit.run.records.ownership import Claim
from toolkit.run.records.user_requests import Intent
from toolkit.run.requeue import requeue
from toolkit.run.requeue.requeue import JobRequeue
from toolkit.run.supervise import supervisor
from toolkit.run.supervise.entry import SupervisorCrashLoopError
from toolkit.run.supervise.supervisor_components import Context
from toolkit.slurm.jobs import JobRow


@pytest.fixture(autouse=True)
def quick(change_limits: ChangeLimits) -> None:
    change_limits(retry_every_s=0.01, ending_s=0.1)


def requeued(run: RunDir, slurm: FakeSlurm) -> JobOutcome:
    """Return the outcome of a job that has just started and is requeued."""
    job = slurm.sbatch(["job.sh"])
    slurm.start(job)
    allocation = Allocation(("node1",), (1,), 1, job_id=job)
    return JobRequeue(run, allocation, slurm, Nodes(run, allocation, spare=0, allow_fewer=False)).bring_back()


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
    assert requeued(run, slurm) is JobOutcome.CANCELLED
    row = slurm.show_job("1")
    assert (row.state, row.restarts) == ("COMPLETING", 0)


@pytest.mark.parametrize("wanted", list(Intent))
def test_a_run_that_a_user_has_ended_is_not_requeued(run: RunDir, wanted: Intent) -> None:
    user_requests.record_intent(run, wanted)
    slurm = FakeSlurm()
    assert requeued(run, slurm) is JobOutcome.CANCELLED
    assert slurm.show_job("1").restarts == 0


@pytest.mark.parametrize("failures", [1, 3])
def test_a_file_server_that_is_away_for_a_moment_does_not_prevent_a_requeue(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    errors = [OSError(errno.EIO, "Input/output error")] * failures

    def asked(run: RunDir) -> None:
        if errors:
            raise errors.pop()

    monkeypatch.setattr(user_requests, "read_intent", asked)
    assert requeued(run, FakeSlurm()) is JobOutcome.REQUEUED
    assert not errors


def test_a_job_that_a_preemption_is_ending_is_requeued_all_the_same(run: RunDir) -> None:
    """Slurm leaves such a job alone when asked to requeue running jobs only."""

    class Preempting(FakeSlurm):
        def start(self, job_id: str, node_list: str = "node1") -> None:
            super().start(job_id, node_list)
            self.preempt(job_id)
            self.advance(0)

    slurm = Preempting(preempt_mode="CANCEL")
    assert requeued(run, slurm) is JobOutcome.REQUEUED


def test_the_two_times_of_a_preemption_may_differ_by_a_second() -> None:
    row = JobRow(job_id="7", state="COMPLETING", start_time=-9.0, preempt_time=1.0, end_time=2.0)
    assert outcome_of_row(row, 0) is JobOutcome.PREEMPTED


class RefusesOnce(FakeSlurm):
    """Refuses a requeue, because it is requeueing the job itself."""

    refused = 0

    def requeue(self, job_id: str, *, if_running: bool = False) -> None:
        self.refused += 1
        raise SlurmRefusedError("Job/step already completing or completed")

    def show_job(self, job_id: str):  # type: ignore[no-untyped-def]
        if self.refused == 2 and super().show_job(job_id).restarts == 0:
            super().requeue(job_id)
        return super().show_job(job_id)


def test_a_refused_requeue_is_tried_again(run: RunDir, change_limits: ChangeLimits) -> None:
    change_limits(retry_every_s=0.01)
    slurm = RefusesOnce()
    assert requeued(run, slurm) is JobOutcome.REQUEUED
    assert slurm.refused == 2


def test_a_job_that_is_no_batch_job_is_asked_for_once(run: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    """Slurm requeues none that salloc has made."""

    class Refuses(FakeSlurm):
        def requeue(self, job_id: str, *, if_running: bool = False) -> None:
            raise SlurmRefusedError("Only batch jobs are accepted or processed for job 1")

    assert requeued(run, Refuses()) is JobOutcome.UNKNOWN
    assert caplog.text.count("the job cannot be requeued") == 1


@pytest.mark.parametrize("why", ["QOSMaxSubmitJobPerUserLimit", "Access/permission denied", "No space left on device"])
def test_a_run_without_its_follow_up_job_ends_with_the_cause(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """The site does not let compute nodes submit, the user has too many jobs, or the disk is full."""

    class Full(FakeSlurm):
        def sbatch(self, arguments: Sequence[str]) -> str:
            if self.submitted:
                raise OSError(errno.ENOSPC, why) if why.startswith("No space") else SlurmRefusedError(why)
            return super().sbatch(arguments)

    slurm = Full()
    job = slurm.sbatch(["--no-requeue", "job.sh"])
    slurm.start(job)
    for name, value in {"SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": "node1", "SLURM_TASKS_PER_NODE": "1"}.items():
        monkeypatch.setenv(name, value)
    allocation = Allocation(("node1",), (1,), 1, job_id=job)
    ours = JobRequeue(run, allocation, slurm, Nodes(run, allocation, spare=0, allow_fewer=False))
    ours.prepare(slurm.show_job(job), slurm.settings(), Claim.of_job(run, allocation, None))
    assert ours.bring_back() is JobOutcome.RUNNING
    assert "Slurm did not take it back (no follow-up job could be submitted: " in ours.why_not_back
    assert why in ours.why_not_back


def test_a_follow_up_job_that_could_not_be_submitted_is_tried_again(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, change_limits: ChangeLimits
) -> None:
    """A controller that restarts when the job starts would cost the run its way back."""
    slurm = FakeSlurm()
    job = slurm.sbatch(["--no-requeue", "job.sh"])
    slurm.start(job)
    for name, value in {"SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": "node1", "SLURM_TASKS_PER_NODE": "1"}.items():
        monkeypatch.setenv(name, value)
    allocation = Allocation(("node1",), (1,), 1, job_id=job)
    claim = Claim.of_job(run, allocation, None)
    ours = JobRequeue(run, allocation, slurm, Nodes(run, allocation, spare=0, allow_fewer=False))
    with monkeypatch.context() as patch:
        patch.setattr(slurm, "sbatch", Mock(side_effect=SlurmError("Unable to contact slurm controller")))
        ours.prepare(slurm.show_job(job), slurm.settings(), claim)
        assert not ours.is_due
        change_limits(follow_up_every_s=0.0)
        ours.prepare(slurm.show_job(job), slurm.settings(), claim)
    assert ours.is_due
    ours.prepare(slurm.show_job(job), slurm.settings(), claim)
    assert (len(claim.owner.follow_ups), ours.is_due) == (2, False)


def test_the_users_exclusions_stay_and_drained_nodes_are_left_to_slurm(run: RunDir) -> None:
    slurm = FakeSlurm()
    row = JobRow(job_id="1", state="RUNNING", excluded="old[1-2]")
    bad = {"n1": BadNode("dead", 1.0), "n2": BadNode("drained: fan", 2.0, is_drained=True)}
    assert requeue.to_exclude(run, row, slurm, bad, {}) == "n1,old[1-2]"


def test_components_that_share_a_partition_must_have_room_beside_each_other(run: RunDir) -> None:
    """Slurm tests each component as if it were alone, and would hold the job that could never start."""

    class Recording(FakeSlurm):
        tests: list[list[str]] = []  # noqa: RUF012

        def could_run(self, arguments: Sequence[str]) -> bool:
            self.tests.append([*arguments])
            return super().could_run(arguments)

    environ = {"SLURM_HET_SIZE": "3"}
    for number, (partition, nodes) in enumerate([("fast", "1"), ("slow", "2"), ("slow", "3")]):
        environ[f"SLURM_JOB_PARTITION_HET_GROUP_{number}"] = partition
        environ[f"SLURM_JOB_NUM_NODES_HET_GROUP_{number}"] = nodes
        environ[f"SLURM_NTASKS_PER_NODE_HET_GROUP_{number}"] = "2"
    others = tuple(JobRow(job_id=job, state="RUNNING", excluded=f"old{job}") for job in ("2", "3"))
    row, slurm = JobRow(job_id="1", state="RUNNING", others=others), Recording()
    assert requeue.to_exclude(run, row, slurm, {"n1": BadNode("dead", 1.0)}, environ) == "n1,old[2-3]"
    alone, *shared = slurm.tests
    assert {"--partition=fast", "--nodes=1", "--ntasks-per-node=2", "--exclude=n1,old[2-3]"} <= {*alone}
    assert shared == [["--partition=slow", "--nodes=5", "--exclude=n1,old[2-3]"]] * 2


def test_a_refusal_of_slurm_is_not_waited_out(change_limits: ChangeLimits) -> None:
    calls = []

    def refuse() -> None:
        calls.append(1)
        raise SlurmRefusedError("no")

    change_limits(retry_every_s=0.0, give_up_after_s=0.1)
    assert outages.retry_slurm(refuse, "x", 0.1) is None
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("restarts", "started", "goes_back"), [(0, 1000.0, True), (0, 2000.0, False), (1, 1000.0, False)]
)
def test_a_first_component_that_was_started_alone_is_given_back_with_all_others(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, restarts: int, started: float, goes_back: bool
) -> None:
    """Slurm does so when the batch host is lost. After the requeue of all the first has one restart more for good."""

    class Het(FakeSlurm):
        def show_job(self, job_id: str) -> JobRow | None:
            row = super().show_job(job_id)
            if row is None:
                return None
            other = JobRow("2", row.state, restarts=restarts, start_time=started)  # Slurm requeues both at one moment
            return replace(row, start_time=2000.5, others=(other,))

    slurm = Het()
    job = slurm.sbatch(["job.sh"])
    slurm.start(job)
    slurm.requeue(job)
    slurm.advance(200)
    slurm.start(job)
    environ = {"HET_SIZE": "2", "JOB_ID": job, "JOB_NODELIST": "n2", "RESTART_COUNT": "1"}
    # the first component has a node of the second
    environ |= {"JOB_NODELIST_HET_GROUP_0": "n2", "JOB_NODELIST_HET_GROUP_1": "n[2-3]"}
    for name, value in environ.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert requeue.bring_back_if_half_started(run, slurm) is goes_back
    row = slurm.show_job(job)
    assert row.restarts == 1 + goes_back


def test_a_job_whose_supervisors_were_killed_goes_back_into_the_queue_and_says_so(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = FakeSlurm()
    job = slurm.sbatch(["job.sh"])
    slurm.start(job)
    for name, value in {"SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": "node1", "SLURM_TASKS_PER_NODE": "1"}.items():
        monkeypatch.setenv(name, value)
    error = SupervisorCrashLoopError("the supervisor on node1 was killed by SIGKILL, and 2 others before it")
    assert not requeue.bring_back_after_deaths(run, error, slurm)  # there was no attempt that could be counted
    run.write_status(RunStatus(state=RunState.RUNNING, job_id=job, attempt=1, nodes=("node1",), tasks=(1,)))
    assert requeue.bring_back_after_deaths(run, error, slurm)
    assert slurm.show_job(job).restarts == 1
    allocation = Allocation(("node1",), (1,), 1, job_id=job, restart_count=1)
    context = Context(run, JobConfig(), allocation, slurm, None, None)
    context.claim = Claim.of_job(run, allocation, None)
    supervisor.close_interrupted(context, None)
    (attempt,) = run.attempts()
    assert (attempt.cause, attempt.decision, attempt.line) == ("node_failure", "requeue", str(error))
    # Requeues in vain are counted, also those of killed supervisors.
    context.config.retry.max_requeues = 1
    run.write_status(run.status().replace(attempt=2, why=str(error)))
    with pytest.raises(ToolkitError, match="given up after 1 requeues without a new checkpoint"):
        supervisor.close_interrupted(context, None)


@pytest.mark.parametrize(("error_number", "goes_back"), [(errno.EIO, True), (errno.EACCES, False)])
def test_a_job_whose_supervisors_were_killed_goes_back_where_its_run_is_out_of_reach(
    run: RunDir,
    monkeypatch: pytest.MonkeyPatch,
    change_limits: ChangeLimits,
    error_number: int,
    goes_back: bool,
) -> None:
    """Before, the guard ended with a traceback and without a result."""
    change_limits(give_up_after_s=0.0)

    def is_away(self: RunDir) -> None:
        raise OSError(error_number, "away")

    monkeypatch.setattr(RunDir, "interrupted_status", is_away)
    slurm = FakeSlurm()
    job = slurm.sbatch(["job.sh"])
    slurm.start(job)
    for name, value in {"SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": "node1", "SLURM_TASKS_PER_NODE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(requeue, "requeue_job", lambda look, slurm, job_id: (JobOutcome.REQUEUED, ""))
    error = SupervisorCrashLoopError("the supervisor on node1 was killed by SIGKILL, and 2 others before it")
    assert requeue.bring_back_after_deaths(run, error, slurm) is goes_back


def test_what_slurm_calls_the_job_is_recorded_also_where_slurm_answers_late(run: RunDir) -> None:
    slurm = FakeSlurm()
    job = slurm.sbatch(["/home/me/job.sh"])
    slurm.start(job)
    allocation = Allocation(("node1",), (1,), 1, job_id=job)
    context = Context(run, JobConfig(), allocation, slurm, None, None)
    context.claim = Claim.of_job(run, allocation, None)
    context.prepare_requeue()
    assert context.claim.owner.command is None
    context.job.row = slurm.show_job(job)
    context.prepare_requeue()
    assert run.owner().command == "/home/me/job.sh"
