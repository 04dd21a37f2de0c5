"""Which job owns a run: follow-up jobs, an earlier submission's jobs, two jobs at once."""

import errno
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.process_limits import ChangeLimits
from toolkit import config as configs
from toolkit.base.errors import (
    EXIT_DONE,
    EXIT_REQUEST,
    ConfigError,
    DamagedFileError,
    JobFailedError,
    RequestError,
    RunLockedError,
    SlurmError,
)
from toolkit.cli import run_facts, run_rows
from toolkit.cli.main import main
from toolkit.cli.run_rows import RunRow
from toolkit.config import JobConfig
from toolkit.files import rundir
from toolkit.files.run_files import RunResult, RunState, RunStatus
from toolkit.files.rundir import RunDir
from toolkit.nodes.allocation import Allocation
from toolkit.plugins.testing.fake_slurm import CancelCall, FakeSlurm
from toolkit.run.job.nodes import Nodes, remembered
from toolkit.run.job.slurm_job import JobOutcome
from toolkit.run.records import ownership, user_requests
from toolkit.run.records.ownership import Claim, Overtaken
from toolkit.run.records.user_requests import Intent
from toolkit.run.requeue.requeue import JobRequeue
from toolkit.run.submission import executors, handle, submit
from toolkit.run.submission.handle import Run, attach
from toolkit.run.submission.resume_run import resume
from toolkit.slurm import commands
from toolkit.slurm.commands import Settings

JOB = "def main(config): print(config)\n"


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch, change_limits: ChangeLimits) -> FakeSlurm:
    """Return the Slurm that every command asks. It also gives submitit its job ids."""
    slurm = FakeSlurm(preempt_mode="CANCEL")
    for module in (executors, handle, commands):
        monkeypatch.setattr(module, "Slurm", lambda: slurm)
    monkeypatch.setattr(
        executors, "_send_to_slurm", lambda run, config, token: slurm.sbatch(["--no-requeue", "job.sh"])
    )
    change_limits(read_files_every_s=0.0, ask_slurm_every_s=0.0, files_lag_s=0.0)
    return slurm


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slurm: FakeSlurm) -> RunDir:
    """Return a run whose job 1 waits in the queue. Its follow-up job 2 waits behind it."""
    folder = tmp_path / "project"
    (folder / "ownjobs").mkdir(parents=True)
    (folder / "ownjobs/__init__.py").touch()
    (folder / "ownjobs/job.py").write_text(JOB)
    (folder / "own.yaml").write_text("job: ownjobs.job\ndata: {name: synthetic}\ntrain: {epochs: 3}\n")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TOOLKIT_RUNS", str(tmp_path / "runs"))
    return submit.submit("own.yaml", executor="slurm").dir


def allocation(job: str | None) -> Allocation:
    return Allocation(("node1",), (1,), 1, job_id=job)


def token_of(run: RunDir) -> str:
    return run.owner().token


def start(run: RunDir, slurm: FakeSlurm, job: str) -> Claim:
    """Start the job: its supervisor takes the run and submits the second follow-up job."""
    slurm.start(job)
    claim = Claim.of_job(run, allocation(job), token_of(run))
    prepare(claim, run, slurm, job)
    run.write_status(
        RunStatus.from_json({"state": "running", "job_id": job, "attempt": 1, "updated": 0.0, "progress": {}})
    )
    return claim


def prepare(claim: Claim, run: RunDir, slurm: FakeSlurm, job: str) -> JobRequeue:
    requeue = JobRequeue(run, allocation(job), slurm, Nodes(run, allocation(job), spare=0, allow_fewer=False))
    requeue.prepare(slurm.show_job(job), Settings(), claim)
    return requeue


def preempted(run: RunDir, slurm: FakeSlurm) -> None:
    """Let job 1 run and be taken away; its follow-up jobs 2 and 3 wait."""
    start(run, slurm, "1")
    slurm.preempt("1")
    slurm.advance(1)
    slurm.advance(1)
    run.write_status(run.status().replace(state=RunState.REQUEUED))


def row_of(run: RunDir) -> RunRow:
    (row,) = run_rows.status_rows([run])
    return row


@pytest.mark.parametrize(("how", "state"), [("cancel", "cancelled"), ("stop", "stopped")])
@pytest.mark.parametrize("then", ["back in the queue", "over"])
def test_a_run_that_is_ended_while_slurm_requeues_its_job_has_a_result(
    run: RunDir,
    slurm: FakeSlurm,
    monkeypatch: pytest.MonkeyPatch,
    change_limits: ChangeLimits,
    how: str,
    state: str,
    then: str,
) -> None:
    """The supervisor has left for the requeue before the request was there."""
    start(run, slurm, "1")
    run.write_status(run.status().replace(state=RunState.REQUEUED))
    row = slurm.show_job("1")
    assert row is not None
    slurm._jobs["1"] = replace(row, state="COMPLETING")
    slurm._final["1"] = "PENDING" if then == "back in the queue" else "CANCELLED"
    change_limits(look_at_ending_every_s=0.0)
    monkeypatch.setattr(time, "sleep", lambda _: slurm.advance(1))
    assert main([how, run.id]) == EXIT_DONE
    result = run.result()
    assert (result.state, result.why) == (state, f"{state} while it waited to continue")
    assert all(row.is_over for row in slurm.user_jobs())


def late(
    monkeypatch: pytest.MonkeyPatch,
    change_limits: ChangeLimits,
    run: RunDir,
    slurm: FakeSlurm,
    ending: Callable[[], str],
) -> None:
    """Let the next sbatch hang until a second resume, which takes the first for dead, has submitted the run."""
    change_limits(submitting_s=0.0)

    def hang(run: RunDir, config: JobConfig, token: str) -> str:
        monkeypatch.setattr(executors, "_send_to_slurm", lambda *_: slurm.sbatch(["--no-requeue", "job.sh"]))
        resume(run, ["train.epochs=7"])
        return ending()

    monkeypatch.setattr(executors, "_send_to_slurm", hang)


@pytest.mark.parametrize("how", ["fails", "answers"])
def test_a_resume_whose_sbatch_hangs_leaves_the_run_to_the_one_that_came_after(
    run: RunDir, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, change_limits: ChangeLimits, how: str
) -> None:
    attach(run).cancel()
    assert run.result().state == "cancelled"
    sent: list[str] = []

    def end() -> str:
        if how == "fails":
            raise SlurmError("sbatch: error: Batch job submission failed: Socket timed out")
        sent.append(slurm.sbatch(["--no-requeue", "late.sh"]))
        return sent[0]

    late(monkeypatch, change_limits, run, slurm, end)
    with pytest.raises((SlurmError, RunLockedError)):
        resume(run, ["train.epochs=5"])
    owner = run.owner()
    assert (owner.number, run.last_owner_number(), run.result(), user_requests.read_intent(run)) == (3, 3, None, None)
    assert run.submission().token == owner.token
    assert (run.status().state, configs.load_config(run.config, site=False).train.epochs) == ("queued", 7)
    assert all(row.state == "CANCELLED" for row in slurm.user_jobs() if row.job_id in sent)
    assert not attach(run).is_over()
    assert [*run.path.glob(".*.kept-*"), *run.submitit.glob("config-*.yaml")] == []


def test_a_submission_whose_sbatch_hangs_and_fails_removes_no_run_that_was_resumed(
    run: RunDir, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, change_limits: ChangeLimits
) -> None:
    def fail() -> str:
        raise SlurmError("sbatch: error: Socket timed out")

    late(monkeypatch, change_limits, run, slurm, fail)
    with pytest.raises(SlurmError):
        submit.submit("own.yaml", executor="slurm")
    (other,) = (each for each in rundir.all_runs() if each != run)
    assert not attach(other).is_over()


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), DamagedFileError("owner.json: no JSON")])
def test_a_job_whose_run_cannot_be_read_after_its_submission_is_cancelled(
    run: RunDir, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    attach(run).cancel()
    sent: list[str] = []

    def answer(*_: object) -> str:
        sent.append(slurm.sbatch(["--no-requeue", "job.sh"]))
        monkeypatch.setattr(RunDir, "owner", Mock(side_effect=error))
        return sent[0]

    monkeypatch.setattr(executors, "_send_to_slurm", answer)
    with pytest.raises(type(error)):
        resume(run, [])
    assert [row.state for row in slurm.user_jobs() if row.job_id in sent] == ["CANCELLED"]


def test_while_the_follow_up_job_waits_the_run_is_its_and_who_waits_goes_on(run: RunDir, slurm: FakeSlurm) -> None:
    preempted(run, slurm)
    row = row_of(run)
    assert (row.state, row.job_id) == ("requeued (PENDING, Dependency)", "2")
    watching = attach(run).watch()
    assert [next(watching)["state"] for _ in range(3)] == ["requeued"] * 3


def test_a_run_whose_follow_up_job_waits_or_runs_is_not_submitted_a_second_time(run: RunDir, slurm: FakeSlurm) -> None:
    preempted(run, slurm)
    ended = "it can be resumed when it has ended: `toolkit cancel"
    with pytest.raises(RequestError, match=ended):
        resume(run)
    start(run, slurm, "2")
    with pytest.raises(RequestError, match=ended):
        resume(run)
    assert sorted(slurm.submitted) == ["1", "2", "3", "4"]  # 3 follows 2, and 4 both


@pytest.mark.parametrize(("how", "state"), [("stop", "stopped"), ("cancel", "cancelled")])
def test_what_waits_is_ended_with_its_follow_up_job_and_has_a_result(
    run: RunDir, slurm: FakeSlurm, how: str, state: str
) -> None:
    preempted(run, slurm)
    assert main([how, run.id]) == EXIT_DONE
    assert run.result().state == state
    assert [slurm.show_job(job).state for job in "23"] == ["CANCELLED"] * 2


def test_a_follow_up_job_that_runs_is_the_one_that_is_told(run: RunDir, slurm: FakeSlurm) -> None:
    preempted(run, slurm)
    start(run, slurm, "2")
    assert attach(run).job_now == "2"
    attach(run).stop()
    assert slurm.sent == [CancelCall("4"), CancelCall("3"), CancelCall("2", signal="CONT", batch=True)]
    attach(run).cancel()
    assert slurm.sent[3:] == [CancelCall("4"), CancelCall("3"), CancelCall("2")]
    assert run.result() is None  # its supervisor writes it


def test_a_cancelled_follow_up_job_leaves_a_run_that_says_how_it_goes_on(run: RunDir, slurm: FakeSlurm) -> None:
    preempted(run, slurm)
    slurm.cancel("2"), slurm.cancel("3")
    assert row_of(run).state == "cancelled"
    told = run_facts.facts(run)
    assert told["next"] == f"`toolkit resume {run.id}` starts over, as there is no checkpoint"
    assert told["why"].startswith("job 3 is over (CANCELLED)")
    with pytest.raises(JobFailedError, match=f"the job 1, with its follow-up jobs 2, 3, is over.*resume {run.id}"):
        attach(run).wait(5)
    assert resume(run).job_id == "4"


def test_a_resume_uses_the_nodes_again_that_its_last_job_had_given_up(run: RunDir, slurm: FakeSlurm) -> None:
    attach(run).cancel()
    Nodes(run, allocation("1"), spare=0, allow_fewer=False).condemn("node1", "no answer")
    resume(run)
    assert remembered(run) == {}


def test_where_a_preemption_cancels_follow_up_jobs_wait_from_the_start(run: RunDir, slurm: FakeSlurm) -> None:
    job = slurm.sbatch(["job.sh"])  # may be requeued
    slurm.start(job)
    assert slurm.show_job(job).can_requeue
    claim = Claim.of_job(run, allocation(job), token_of(run))
    first = prepare(claim, run, slurm, job)
    assert claim.owner.follow_ups == ("4", "5")
    assert [waits_for(slurm, job) for job in claim.owner.follow_ups] == ["afterany:3", "afterany:3:4"]
    assert first.bring_back() is JobOutcome.REQUEUED
    again = Claim.of_job(run, allocation(job), None)  # Slurm or its guard has started it again
    prepare(again, run, slurm, job)
    assert again.owner.follow_ups == ("4", "5")
    assert len(slurm.submitted) == 5
    slurm.cancel("4")
    assert first.bring_back() is JobOutcome.REQUEUED  # by itself: no follow-up job is left
    assert slurm.sent[-2:] == [CancelCall("4"), CancelCall("5")]
    assert slurm.show_job(job).state == "PENDING"


@pytest.mark.parametrize("first", ["the job", "the login node"])
def test_a_job_that_starts_before_its_follow_up_job_is_recorded_has_two_in_all(
    tmp_path: Path, run: RunDir, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """Of three, two would start at the end of the job, and one of them would take the run from the other."""
    sbatch, claims = slurm.sbatch, list[Claim]()

    def starts_at_once(arguments: Sequence[str]) -> str:
        job = sbatch(arguments)
        if job == "4":  # the follow-up job of job 3
            (other,) = {*(tmp_path / "runs/own").iterdir()} - {run.path}
            slurm.start("3")
            claims.append(Claim.of_job(RunDir(other), allocation("3"), token_of(RunDir(other))))
            if first == "the job":
                prepare(claims[0], RunDir(other), slurm, "3")
        return job

    monkeypatch.setattr(slurm, "sbatch", starts_at_once)
    other = submit.submit("own.yaml", executor="slurm").dir
    if first == "the login node":
        prepare(claims[0], other, slurm, "3")
    pending = [job for job in slurm.submitted if slurm.show_job(job).state == "PENDING"]
    assert ownership.jobs_of(other) == (["3", "5", "6"] if first == "the job" else ["3", "4", "5"])
    assert pending == ["1", "2", *ownership.jobs_of(other)[1:]]


def waits_for(slurm: FakeSlurm, job: str) -> str:
    return next(a.partition("=")[2] for a in slurm.submitted[job] if a.startswith("--dependency="))


def test_whenever_a_job_starts_another_one_waits_already(run: RunDir, slurm: FakeSlurm) -> None:
    """Otherwise a preemption in the first seconds of a job would end the run."""
    assert ownership.jobs_of(run) == ["1", "2"]
    start(run, slurm, "1")
    assert ownership.jobs_of(run) == ["1", "2", "3"]
    start(run, slurm, "3")  # 2 was preempted before it could do anything
    assert ownership.jobs_of(run) == ["3", "4", "5"]
    assert [waits_for(slurm, job) for job in "2345"] == ["afterany:1", "afterany:1:2", "afterany:3", "afterany:3:4"]


def test_where_no_more_jobs_may_be_queued_the_run_goes_on_with_those_that_wait(
    run: RunDir, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(arguments: object) -> str:
        raise SlurmError("Job violates accounting/QOS policy (job submit limit)")

    monkeypatch.setattr(slurm, "sbatch", refuse)
    claim = start(run, slurm, "1")
    assert claim.owner.follow_ups == ("2",)
    assert "no follow-up job could be submitted: Job violates" in caplog.text


def test_a_run_that_slurm_brings_back_is_submitted_without_a_follow_up_job(
    run: RunDir, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    attach(run).cancel()
    slurm.preempt_mode = "REQUEUE"
    monkeypatch.setattr(executors, "_send_to_slurm", lambda run, config, token: slurm.sbatch(["job.sh"]))
    resume(run)
    assert ownership.jobs_of(run) == ["3"]


def test_without_requeue_and_follow_up_job_a_job_does_not_ask_to_be_requeued(run: RunDir, slurm: FakeSlurm) -> None:
    slurm.start("1")
    job_requeue = prepare(Claim.of_job(run, allocation("1"), token_of(run)), run, slurm, "1")
    slurm.cancel("2")
    slurm.preempt("1", grace_s=30)
    assert job_requeue.bring_back() is JobOutcome.PREEMPTED  # and not after a minute of refusals


def test_an_expedited_job_that_has_follow_up_jobs_is_not_requeued(run: RunDir, slurm: FakeSlurm) -> None:
    """Slurm would put it back for its exit code. The follow-up jobs would wait for its end for ever."""
    job = slurm.sbatch(["--requeue=expedite", "job.sh"])
    slurm.start(job)
    prepare(Claim.of_job(run, allocation(job), token_of(run)), run, slurm, job)
    slurm.finish(job, exit_code=1)
    assert slurm.show_job(job).state == "FAILED"


def test_a_job_of_an_earlier_submission_finds_the_run_taken_and_leaves_it(run: RunDir, slurm: FakeSlurm) -> None:
    old = token_of(run)
    attach(run).cancel()
    assert resume(run).job_id == "3"
    with pytest.raises(Overtaken, match=r"belongs to job 3: nothing is left to do here"):
        Claim.of_job(run, allocation("1"), old)
    new = Claim.of_job(run, allocation("3"), token_of(run))
    with pytest.raises(Overtaken):
        Claim.of_job(run, allocation("1"), old)
    assert new.holds()


def test_a_job_that_has_handed_the_run_on_never_takes_it_back(run: RunDir, slurm: FakeSlurm) -> None:
    first = Claim.of_job(run, allocation("1"), token_of(run))
    again = Claim.of_job(run, allocation("1"), None)  # Slurm has started it again; an sbatch script has no token
    assert (first.holds(), again.holds()) == (False, True)
    follow_up = Claim.of_job(run, allocation("2"), token_of(run))
    assert (again.holds(), follow_up.holds()) == (False, True)
    with pytest.raises(Overtaken):
        Claim.of_job(run, allocation("1"), token_of(run))
    with pytest.raises(Overtaken):
        again.renew()


def test_what_an_earlier_owner_writes_too_late_is_corrected(run: RunDir) -> None:
    Claim.of_job(run, allocation("1"), token_of(run))
    late = run.owner()
    claim = Claim.of_job(run, allocation("2"), token_of(run))
    run.write_owner(late)
    assert claim.holds()
    assert run.owner().job_id == "2"


def at_once(*calls: Callable[[], object]) -> list[object]:
    """Make the calls at the same time; return what each returned or raised."""
    barrier = threading.Barrier(len(calls))

    def call(one: Callable[[], object]) -> object:
        barrier.wait()
        try:
            return one()
        except (RequestError, Overtaken) as refused:
            return refused

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(call, calls))


def test_of_four_resumes_at_once_one_submits_a_job(run: RunDir, slurm: FakeSlurm) -> None:
    attach(run).cancel()
    answers = at_once(*[lambda: resume(run, executor="slurm")] * 4)
    assert sum(isinstance(answer, Run) for answer in answers) == 1, answers
    assert sorted(slurm.submitted) == ["1", "2", "3", "4"]
    assert all(
        "being resumed" in str(a) or "being submitted" in str(a) or "queued" in str(a)
        for a in answers
        if isinstance(a, RequestError)
    )


@pytest.mark.parametrize("method", ["clear_result", "write_owner", "write_status"])
def test_a_resume_in_the_midst_of_another_is_refused(
    run: RunDir, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    attach(run).cancel()
    write = getattr(RunDir, method)

    def write_beside(self: RunDir, *args: Any) -> None:
        monkeypatch.setattr(RunDir, method, write)
        for before in (lambda: None, lambda: write(self, *args)):
            before()
            with pytest.raises(RequestError, match=r"is (being submitted at this moment|already being resumed)"):
                resume(run, executor="slurm")

    monkeypatch.setattr(RunDir, method, write_beside)
    assert resume(run, executor="slurm").job_id == "3"
    assert sorted(slurm.submitted) == ["1", "2", "3", "4"]


def test_of_two_attempts_at_once_one_holds_the_run(run: RunDir) -> None:
    claims = [Claim.of_job(run, allocation("1"), token_of(run)) for _ in range(2)]
    for claim in claims:  # of the same number, as two supervisors that have not seen each other
        claim.owner = claims[0].owner
    answers = at_once(*[claim.renew for claim in claims])
    assert sum(isinstance(answer, Overtaken) for answer in answers) >= 1


@pytest.mark.parametrize("has_links", [True, False])
def test_of_many_that_take_one_number_one_gets_it(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    if not has_links:
        monkeypatch.setattr(os, "link", Mock(side_effect=OSError(errno.EPERM, "Operation not permitted")))
    assert at_once(*[lambda: run.claim_owner_number(7)] * 8).count(True) == 1
    assert (run.path / "owners/7").read_text().split()[1] == str(os.getpid())
    assert not list((run.path / "owners").glob(".*"))


@pytest.mark.parametrize("call", ["link", "unlink"])
def test_an_attempt_goes_on_whose_number_was_given_out_without_an_answer(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, change_limits: ChangeLimits, call: str
) -> None:
    change_limits(retry_every_s=0.0)
    claim, plain = Claim.of_job(run, allocation("1"), token_of(run)), getattr(os, call)
    lost: list[object] = []

    def without_an_answer(*paths: Any, **options: Any) -> None:
        plain(*paths, **options)
        if not lost:
            lost.append(paths)
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, call, without_an_answer)
    before = claim.owner.number
    claim.renew()
    assert lost
    assert (claim.owner.number, claim.holds()) == (before + 1, True)
    assert not run.claim_owner_number(before + 1)  # another process, and another attempt of this one


def test_a_resume_that_a_full_disk_refuses_can_be_said_again_at_once(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    attach(run).cancel()
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", no_space)
        with pytest.raises(OSError, match=r"No space.*owner\.json"):
            resume(run, executor="slurm")
    assert resume(run, executor="slurm").job_id == "3"


def test_a_resume_that_fails_on_a_full_disk_once_queued_leaves_the_run_as_it_was(
    run: RunDir, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing can be written then, not even to put the run back."""
    attach(run).cancel()
    names = ("owner.json", "status.json", "requests/intent.json", "result.json")
    before = {name: (run.path / name).read_text() for name in names}
    send = executors._send_to_slurm

    def fills_up(*args: Any) -> str:
        send(*args)  # sbatch has taken the job
        monkeypatch.setattr(os, "fsync", no_space)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(executors, "_send_to_slurm", fills_up)
    with pytest.raises(OSError, match="No space"):
        resume(run, executor="slurm")
    monkeypatch.undo()
    assert {name: (run.path / name).read_text() for name in names} == before
    assert not [path for path in run.path.iterdir() if "kept" in path.name]
    with pytest.raises(Overtaken):
        Claim.of_job(run, allocation("2"), "the token of that job")


@pytest.mark.parametrize("kind", ["submit", "exec"])
def test_a_submission_for_which_the_disk_has_no_room_leaves_no_run_and_no_job(
    kind: str, run: RunDir, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fills up before the first file, between two, or after the job was queued."""

    def again() -> Run:
        if kind == "submit":
            return submit.submit("own.yaml", ["name=again"], executor="slurm")
        return submit.submit_command(["true"], name="again", executor="slurm")

    fsync, failed, before = os.fsync, 0, {*slurm.submitted}
    for room in itertools.count():  # the disk takes one more flush each time, until all succeed
        written = itertools.count()
        monkeypatch.setattr(os, "fsync", lambda fd, w=written, r=room: fsync(fd) if next(w) < r else no_space(fd))
        try:
            sent = again()
            break
        except OSError:
            failed += 1
        rows = [slurm.show_job(job) for job in {*slurm.submitted} - before]
        assert [row for row in rows if row and row.state != "CANCELLED"] == []
        assert [found for found in rundir.all_runs() if found.name == "again"] == []
    assert failed > 3
    assert ownership.jobs_of(sent.dir) == [sent.job_id]


def no_space(fd: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_who_died_while_it_resumed_a_run_holds_nobody_up_for_ever(run: RunDir, change_limits: ChangeLimits) -> None:
    attach(run).cancel()
    run.claim_owner_number(ownership.number_of(run) + 1)  # and nothing more
    with pytest.raises(RequestError, match="already being resumed"):
        resume(run, executor="slurm")
    change_limits(submitting_s=0.0)
    assert resume(run, executor="slurm").job_id == "3"


@pytest.mark.parametrize("has_owned", [False, True])
def test_who_died_here_while_it_resumed_a_run_holds_nobody_up_at_all(run: RunDir, has_owned: bool) -> None:
    attach(run).cancel()
    before = ownership.number_of(run)
    taken = ownership.take(run, before)
    (run.path / "owners" / str(taken)).write_text(f"{socket.gethostname()} {2**22 + 1}")
    if has_owned:  # it has submitted the run since `before` was read, and has ended
        ownership.submit_as(run, "slurm", taken)
        with pytest.raises(RequestError, match="already being resumed"):
            ownership.take(run, before)
    else:
        assert resume(run, executor="slurm").job_id == "3"


def test_a_run_that_is_being_submitted_says_so(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    attach(run).cancel()
    run.clear_result()
    ownership.submit_as(run, "slurm", ownership.take(run, ownership.number_of(run)))
    for command in ("stop", "cancel", "resume"):
        assert main([command, run.id]) == EXIT_REQUEST
        assert "is being submitted at this moment" in capsys.readouterr().err


def test_a_submission_that_was_interrupted_can_be_ended_or_made_again(run: RunDir, slurm: FakeSlurm) -> None:
    """There may be a job or none. If there is one, it finds that it is not wanted, or does not own the run."""
    attach(run).cancel()
    run.clear_result()
    user_requests.clear_intent(run)
    taken = ownership.submit_as(run, "slurm", ownership.take(run, ownership.number_of(run)))
    dead = taken.replace(pid=2**22 + 1)
    run.write_owner(dead)
    attach(run).stop()
    assert (run.result().state, user_requests.read_intent(run)) == ("stopped", Intent.STOP)
    run.clear_result()
    assert resume(run).job_id == "3"
    with pytest.raises(Overtaken):
        Claim.of_job(run, allocation("7"), dead.token)


def test_a_suspended_job_gets_no_signal(run: RunDir, slurm: FakeSlurm, caplog: pytest.LogCaptureFixture) -> None:
    """scancel would wait for the job to continue, until it is told to give up."""
    start(run, slurm, "1")
    slurm.suspend("1")
    attach(run).stop()
    assert not any(sent.signal for sent in slurm.sent)
    assert (user_requests.read_intent(run), run.result()) == (Intent.STOP, None)
    assert "the run stops when Slurm resumes it" in caplog.text
    assert row_of(run).state == "running (SUSPENDED)"
    attach(run).cancel()
    assert (slurm.sent[-1].job_id, slurm.sent[-1].signal) == ("1", None)
    assert run.result().state == "cancelled"


def test_a_stop_ends_a_job_that_was_suspended_before_it_trained(run: RunDir, slurm: FakeSlurm) -> None:
    start(run, slurm, "1")
    run.write_status(run.status().replace(state=RunState.STARTING))
    slurm.suspend("1")
    attach(run).stop()
    assert (run.result().state, slurm.show_job("1").state) == ("stopped", "CANCELLED")


def test_stop_cancel_and_resume_may_be_said_twice(
    run: RunDir, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    start(run, slurm, "1")
    said = []
    for words in ("stop", "stop", "cancel", "stop", "resume", "cancel"):
        code = main([words, run.id])
        out = capsys.readouterr()
        said.append((code, (out.out or out.err).strip().partition(": ")[2]))
    assert [code for code, _ in said] == [0, 0, 0, 0, EXIT_REQUEST, 0]
    assert "stop was asked for before" in said[1][1]
    assert "cancel was asked for before" in said[3][1]
    assert "it can be resumed when it has ended" in said[4][1]
    assert "cancel was asked for before" in said[5][1]
    assert user_requests.read_intent(run) is Intent.CANCEL
    assert sorted(slurm.submitted) == ["1", "2", "3"]
    slurm.advance(1)
    assert row_of(run).state == "cancelled"
    assert attach(run).wait(5)["state"] == "cancelled"
    assert resume(run).job_id == "4"
    with pytest.raises(RequestError, match="is queued"):
        resume(run)


def completed(run: RunDir) -> None:
    run.write_result(RunResult.from_json({"state": "completed", "metrics": {}, "attempts": 1}))


def test_a_completed_run_goes_on_to_more_epochs_when_the_job_is_submitted(run: RunDir, slurm: FakeSlurm) -> None:
    completed(run)
    old = run.config.read_text()
    with pytest.raises(RequestError, match=r"train.epochs=N` continues to more than its 3 epochs"):
        resume(run)
    assert main(["resume", run.id, "train.epochs=5", "optim.lr=0.25"]) == EXIT_DONE
    config = configs.load_config(run.config, site=False)
    assert (config.train.epochs, config.optim.lr) == (5, 0.25)
    assert [path.read_text() for path in run.path.glob("config.before-*.yaml")] == [old]
    assert list(run.submitit.glob("config-*")) == []
    assert run.result() is None


def test_the_job_that_starts_before_the_submission_knows_its_id_has_the_new_settings(
    run: RunDir, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    completed(run)
    seen = []

    def start_at_once(run: RunDir, config: JobConfig, token: str) -> str:
        ownership.adopt_config(run, "an older submission's")
        seen.append(configs.load_config(run.config, site=False).train.epochs)
        ownership.adopt_config(run, token)
        seen.append(configs.load_config(run.config, site=False).train.epochs)
        return "9"

    monkeypatch.setattr(executors, "_send_to_slurm", start_at_once)
    resume(run, ["train.epochs=5"])
    assert seen == [3, 5]
    assert len(list(run.path.glob("config.before-*.yaml"))) == 1


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.seed=7", "train.seed was 0, not 7"),
        ("name=other", "name was 'own', not 'other'"),
        ("optim.name=adamw", "optim.name was 'sgd', not 'adamw'"),
        ("optim.rl=1", "optim.rl: unknown key"),
        ("data.global_batch_size=0", "data.global_batch_size"),
        ("train.epochs=2", "is completed"),
    ],
)
def test_a_change_that_a_run_cannot_go_on_with_touches_nothing(run: RunDir, override: str, words: str) -> None:
    completed(run)
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    with pytest.raises((ConfigError, RequestError), match=words):
        resume(run, [override, *([] if override.startswith("train.epochs") else ["train.epochs=9"])])
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before


def test_a_submission_that_fails_leaves_settings_result_and_owner(
    run: RunDir, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(run, slurm, "1")
    attach(run).stop()
    completed(run)
    old = run.config.read_text()

    def refuses(*args: object) -> str:
        raise SlurmError("invalid partition specified")

    monkeypatch.setattr(executors, "_send_to_slurm", refuses)
    with pytest.raises(SlurmError):
        resume(run, ["train.epochs=5"])
    assert run.config.read_text() == old
    assert run.result().state == "completed"
    assert user_requests.read_intent(run) is Intent.STOP
    assert ownership.jobs_of(run) == ["1", "2", "3"]
    assert list(run.submitit.glob("config-*")) == []
    monkeypatch.setattr(executors, "_send_to_slurm", lambda *_: "9")
    assert resume(run, ["train.epochs=5"]).job_id == "9"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"number": "x"}', '{"number": 3}'])
def test_an_owner_file_that_cannot_be_read_is_refused_until_it_is_gone(run: RunDir, text: str) -> None:
    (run.path / "owner.json").write_text(text)
    with pytest.raises(DamagedFileError, match=r"owner\.json cannot be read"):
        Claim.of_job(run, allocation("1"), "any")
    (run.path / "owner.json").unlink()
    assert ownership.jobs_of(run) == ["1"]
    claim = Claim.of_job(run, allocation("1"), "any")
    assert claim.holds()
    assert json.loads((run.path / "owner.json").read_text())["jobs"] == ["1"]


def test_a_full_disk_does_not_cost_a_job_its_turn(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, change_limits: ChangeLimits
) -> None:
    change_limits(retry_every_s=0.01)
    asked = itertools.count()

    def on_a_full_disk(write: Callable[..., object]) -> Callable[..., object]:
        def written(self: RunDir, *values: object) -> object:
            if next(asked) % 3:
                return write(self, *values)
            raise OSError(28, "No space left on device")

        return written

    monkeypatch.setattr(RunDir, "claim_owner_number", on_a_full_disk(RunDir.claim_owner_number))
    monkeypatch.setattr(RunDir, "write_owner", on_a_full_disk(RunDir.write_owner))
    assert Claim.of_job(run, allocation("1"), token_of(run)).holds()


def test_a_local_submission_keeps_nobodys_pipe_open(tmp_path: Path) -> None:
    """In `x=$(toolkit submit ...)` a child would hold the pipe until the run's end."""
    log = tmp_path / "controller.log"
    read_end, write_end = os.pipe()
    saved = os.dup(1)
    os.dup2(write_end, 1)
    try:
        with executors._output_to(log):
            child = subprocess.Popen(["sh", "-c", "echo mine; exec sleep 600"])
        os.write(1, b"run 1")
    finally:
        os.dup2(saved, 1)
        os.close(write_end)
        os.close(saved)
    try:
        deadline = time.monotonic() + 10
        while not log.read_text() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (os.read(read_end, 99), os.read(read_end, 99)) == (b"run 1", b"")  # the end, while it runs
        assert child.poll() is None
        assert log.read_text() == "mine\n"
    finally:
        child.kill()
        child.wait()
        os.close(read_end)


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_a_daemon_without_standard_files_gives_its_children_their_own(tmp_path: Path, closed: str) -> None:
    """A file that is opened while one of them is closed would get its number."""
    code = (
        "import os, pathlib, subprocess, sys\n"
        "from toolkit.run.submission import executors\n"
        "log = pathlib.Path(sys.argv[1])\n"
        "with executors._output_to(log):\n"
        "    subprocess.run(['sh', '-c', 'cat; echo out; echo err >&2'], check=True)\n"
        "(log.parent / 'after').write_text(' '.join(os.readlink(f'/proc/self/fd/{n}') for n in range(3)))\n"
    )
    log = tmp_path / "controller.log"
    script = f'"$0" -c "$1" "$2" {closed}'
    done = subprocess.run(["sh", "-c", script, sys.executable, code, str(log)], stdin=subprocess.DEVNULL, text=True)
    assert done.returncode == 0
    assert log.read_text() == "out\nerr\n"
    assert str(log) not in (tmp_path / "after").read_text()


def test_ranks_of_an_attempt_that_was_overtaken_no_longer_own_the_run(tmp_path: Path) -> None:
    run = rundir.create("name", tmp_path)
    first = Claim.of_job(run, Allocation(("n1",), (1,), 1, job_id="1"), None)
    number = first.owner.number
    assert run.belongs_to(number)
    first.renew()
    assert run.belongs_to(first.owner.number)
    assert not run.belongs_to(number)


def test_another_job_without_a_token_does_not_take_the_run(tmp_path: Path) -> None:
    run = rundir.create("name", tmp_path)
    Claim.of_job(run, Allocation(("n1",), (1,), 1, job_id="1"), None)
    with pytest.raises(Overtaken):
        Claim.of_job(run, Allocation(("n1",), (1,), 1, job_id="9"), None)
