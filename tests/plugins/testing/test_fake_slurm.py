"""FakeSlurm: the states that its jobs pass. tests/slurm/test_cluster_commands.py checks them with a real Slurm."""

import pytest

from toolkit.base.errors import SlurmError
from toolkit.plugins.testing.fake_slurm import REQUEUE_DELAY_S, CancelCall, FakeSlurm
from toolkit.slurm.commands import Slurm, SlurmCommands
from toolkit.slurm.jobs import JobRow


@pytest.fixture
def slurm() -> FakeSlurm:
    return FakeSlurm()


def shown(slurm: FakeSlurm, job_id: str) -> JobRow:
    row = slurm.show_job(job_id)
    assert row is not None
    return row


def running(slurm: FakeSlurm, *options: str) -> str:
    job_id = slurm.sbatch([*options, "job.sh"])
    slurm.start(job_id, "node[1-2]")
    return job_id


def test_both_slurms_meet_the_protocol(slurm: FakeSlurm) -> None:
    both: list[SlurmCommands] = [slurm, Slurm({})]
    assert [one.available() for one in both] == [True, False]


def test_a_job_runs_on_its_nodes_until_it_finishes(slurm: FakeSlurm) -> None:
    job = slurm.sbatch(["--time=10", "job.sh"])
    assert shown(slurm, job).state == "PENDING"
    slurm.start(job, "node[1-2]")
    row = shown(slurm, job)
    assert (row.state, row.batch_host, row.time_limit_s) == ("RUNNING", "node1", 600.0)
    slurm.finish(job, exit_code=3)
    assert (shown(slurm, job).state, shown(slurm, job).exit_code) == ("FAILED", 3)


def test_a_cancelled_job_is_completing_before_it_is_over(slurm: FakeSlurm) -> None:
    job = running(slurm)
    slurm.cancel(job)
    row = shown(slurm, job)
    assert (row.state, row.preempt_time, row.is_over) == ("COMPLETING", None, False)
    slurm.advance(1)
    assert shown(slurm, job).state == "CANCELLED"


def test_a_job_at_its_limit_times_out(slurm: FakeSlurm) -> None:
    job = running(slurm, "--time=1")
    slurm.advance(60)
    row = shown(slurm, job)
    assert row.end_time is not None
    assert row.start_time is not None
    assert row.end_time - row.start_time >= 60
    slurm.advance(1)
    assert shown(slurm, job).state == "TIMEOUT"


def test_a_preempted_job_stays_running_in_its_grace_and_is_then_requeued(slurm: FakeSlurm) -> None:
    job = running(slurm)
    slurm.preempt(job, grace_s=60)
    row = shown(slurm, job)
    assert (row.state, row.preempt_time, row.end_time) == ("RUNNING", slurm.now, slurm.now + 60)
    slurm.advance(61)
    row = shown(slurm, job)
    assert (row.state, row.restarts, row.preempt_time) == ("PENDING", 1, None)


def test_preemption_that_cancels_ends_the_job_unless_it_is_requeued_in_time(slurm: FakeSlurm) -> None:
    slurm.preempt_mode = "CANCEL"
    lost, saved = running(slurm), running(slurm)
    for job in (lost, saved):
        slurm.preempt(job)
        slurm.advance(0)
        assert shown(slurm, job).state == "COMPLETING"
        if job == saved:
            slurm.requeue(job)
        slurm.advance(1)
    assert shown(slurm, lost).state == "PREEMPTED"
    assert shown(slurm, saved).state == "PENDING"


def test_a_requeued_job_waits_and_counts_its_restarts(slurm: FakeSlurm) -> None:
    job = running(slurm)
    slurm.requeue(job)
    slurm.requeue(job)
    assert shown(slurm, job).restarts == 1
    with pytest.raises(AssertionError, match="may start in 121 s"):
        slurm.start(job)
    slurm.advance(REQUEUE_DELAY_S)
    slurm.start(job)


def test_a_requeue_is_refused_where_it_is_forbidden(slurm: FakeSlurm) -> None:
    job = running(slurm, "--no-requeue")
    with pytest.raises(SlurmError, match="presently disabled"):
        slurm.requeue(job)
    slurm.fail_node(job)
    assert shown(slurm, job).state == "NODE_FAIL"


def test_a_failed_node_requeues_the_job(slurm: FakeSlurm) -> None:
    job = running(slurm)
    slurm.fail_node(job)
    assert shown(slurm, job).restarts == 1


def test_nodes_are_excluded_from_pending_jobs_only(slurm: FakeSlurm) -> None:
    job = running(slurm)
    with pytest.raises(SlurmError, match="no longer pending"):
        slurm.exclude_nodes(job, "node2")
    slurm.requeue(job)
    slurm.exclude_nodes(job, "node2")
    assert slurm.excluded == {job: "node2"}


def test_a_pending_job_may_depend_on_others_and_a_running_one_may_not(slurm: FakeSlurm) -> None:
    job = slurm.sbatch(["job.sh"])
    slurm.depend(job, ["7", "8_1"])
    assert (slurm.depends, slurm.show_job(job).reason) == ({job: ("7", "8_1")}, "Dependency")
    slurm.start(job)
    with pytest.raises(SlurmError, match="no longer pending"):
        slurm.depend(job, ["7"])


def test_requeueing_an_element_leaves_the_rest_of_the_array_alone(slurm: FakeSlurm) -> None:
    array = slurm.sbatch(["--array=0-2%2", "job.sh"])
    for index in range(3):
        slurm.start(f"{array}_{index}")
    slurm.requeue(f"{array}_1")
    assert [shown(slurm, f"{array}_{index}").restarts for index in range(3)] == [0, 1, 0]
    slurm.requeue(array)
    assert [shown(slurm, f"{array}_{index}").restarts for index in range(3)] == [1, 1, 1]


def test_a_forgotten_job_is_known_to_accounting_only(slurm: FakeSlurm) -> None:
    job = running(slurm)
    slurm.finish(job)
    slurm.forget(job)
    assert slurm.show_job(job) is None
    assert slurm.show_jobs([job])[job].state == "COMPLETED"
    slurm.accounting = False
    assert slurm.show_jobs([job]) == {job: None}


def test_signals_are_recorded_and_steps_found_by_name(slurm: FakeSlurm) -> None:
    job = running(slurm)
    step = slurm.add_step(job, "attempt-0")
    assert slurm.find_step(job, "attempt-0") == step == "0"
    assert slurm.find_step(job, "attempt-1") is None
    slurm.cancel(job, signal="KILL", step=step)
    slurm.cancel(job, signal="USR1", batch=True)
    assert slurm.sent == [CancelCall(job, "KILL", "0"), CancelCall(job, "USR1", batch=True)]
    assert shown(slurm, job).state == "RUNNING"


def test_job_ids_are_never_given_twice(slurm: FakeSlurm) -> None:
    first = slurm.sbatch(["--array=0-2", "job.sh"])
    slurm.cancel(first)
    slurm.forget(first)
    assert slurm.sbatch(["job.sh"]) == "4"


def test_a_controller_that_is_down_answers_nothing(slurm: FakeSlurm) -> None:
    job = running(slurm)
    slurm.is_up = False
    assert not slurm.available()
    with pytest.raises(SlurmError, match="Unable to contact"):
        slurm.show_job(job)


def test_a_job_with_expedited_requeue_starts_again_at_once_and_is_held_if_it_fails(
    slurm: FakeSlurm,
) -> None:
    job = running(slurm, "--requeue=expedite")
    slurm.requeue(job)
    slurm.start(job)
    slurm.finish(job, exit_code=1)
    assert (shown(slurm, job).state, shown(slurm, job).restarts) == ("REQUEUE_HOLD", 2)
    job = running(slurm, "--requeue=expedite")
    slurm.forbid_requeue(job)
    slurm.finish(job, exit_code=1)
    assert shown(slurm, job).state == "FAILED"
