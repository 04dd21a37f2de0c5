"""Runs that wait for others: for which, what follows, and which waits are refused."""

import json
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.plugins.sweep.test_submission import project  # noqa: F401  # a fixture
from tests.plugins.sweep.test_submission import submit as submit_sweep
from tests.process_limits import ChangeLimits
from tests.unit.owners import STRANGER, give
from tests.unit.run.test_supervisor import Ranks, completes
from toolkit import config as configs
from toolkit.base import fsio
from toolkit.base.errors import ConfigError, RequestError, RunNotFoundError, SlurmError
from toolkit.cli import main as cli
from toolkit.cli import run_rows
from toolkit.config import JobConfig
from toolkit.files import rundir
from toolkit.files.run_files import DependencyRecord, RunState, RunStatus, Submission
from toolkit.files.rundir import RunDir
from toolkit.nodes.allocation import Allocation
from toolkit.plugins.sweep import awaited, request, submission
from toolkit.plugins.sweep.request import Options
from toolkit.plugins.testing.fake_slurm import FakeSlurm
from toolkit.run.attempt.journal import write_ended
from toolkit.run.records import ownership, user_requests
from toolkit.run.records.user_requests import Intent
from toolkit.run.submission import resume_run, submit
from toolkit.run.supervise.supervisor import Supervisor
from toolkit.slurm import commands

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture(autouse=True)
def patience(change_limits: ChangeLimits) -> None:
    change_limits(retry_every_s=0.01, give_up_after_s=0.05, look_at_awaited_every_s=0.01, files_lag_s=0.05)


def new_run(name: str) -> RunDir:
    run = rundir.create(name)
    fsio.write_atomic(run.config, configs.dump_config(JobConfig(name=name)))
    return run


def submitted(name: str, slurm: FakeSlurm, *options: str) -> RunDir:
    """Return a run whose job waits in the queue."""
    run = new_run(name)
    owner = ownership.submit_as(run, "slurm", ownership.take(run, 0))
    job = slurm.sbatch([*options, "job.sh"])
    run.write_owner(owner.replace(jobs=(job,)))
    run.write_status(RunStatus(state=RunState.QUEUED))
    return run


def local_run(name: str) -> RunDir:
    """Return a run at work on another machine without Slurm. Its processes cannot be seen from here."""
    run = new_run(name)
    owner = ownership.submit_as(run, "local", ownership.take(run, 0))
    run.write_owner(owner.replace(host="elsewhere"))
    run.write_submission(Submission("local", "1", host="elsewhere", token=owner.token))
    return run


def waiting_for(slurm: FakeSlurm, *others: RunDir | str) -> RunDir:
    """Return a run that waits for others, and whose job Slurm has started."""
    run = submitted("second", slurm)
    names = [other if isinstance(other, str) else other.id for other in others]
    fsio.write_json(run.after_path, awaited.find(names, "slurm", slurm.show_jobs).to_json())
    slurm.start(ownership.jobs_of(run)[0])
    return run


def start_job(run: RunDir, slurm: FakeSlurm, ranks: Ranks | None = None) -> int:
    """Run the job's supervisor as Slurm would start it; return its exit code."""
    (job, *_) = ownership.jobs_of(run)
    row = slurm.show_job(job)
    assert row is not None
    owner = run.owner()
    allocation = Allocation(("node1",), (1,), 1, job_id=job, restart_count=row.restarts)
    config = configs.load_config(run.config, site=False)
    token = owner and owner.token
    return Supervisor(run, config, allocation, ranks or Ranks(), slurm, token=token).run()  # type: ignore[arg-type]


def complete(run: RunDir, slurm: FakeSlurm) -> None:
    write_ended(run, RunState.COMPLETED, "completed")
    (job, *_) = ownership.jobs_of(run)
    if slurm.show_job(job).state == "PENDING":
        slurm.start(job)
    slurm.finish(job)


@pytest.fixture
def slurm() -> FakeSlurm:
    return FakeSlurm()


@pytest.fixture
def first(slurm: FakeSlurm) -> RunDir:
    return submitted("first", slurm)


def test_a_run_whose_predecessor_has_completed_starts_and_waits_no_more(first: RunDir, slurm: FakeSlurm) -> None:
    run = waiting_for(slurm, first)
    complete(first, slurm)
    assert start_job(run, slurm, Ranks(completes)) == 0
    assert run.result().state is RunState.COMPLETED
    assert run.dependencies() is None
    # Slurm may start it again when the first run was resumed to more epochs: it does not wait a second time.
    run.clear_result()
    first.clear_result()
    slurm.requeue(*ownership.jobs_of(run))
    slurm.advance(200)
    slurm.start(*ownership.jobs_of(run))
    assert start_job(run, slurm, Ranks(completes)) == 0


def test_a_run_whose_predecessor_was_requeued_goes_back_behind_its_job(first: RunDir, slurm: FakeSlurm) -> None:
    run = waiting_for(slurm, first)
    (job,), (first_job,) = ownership.jobs_of(run), ownership.jobs_of(first)
    assert start_job(run, slurm) == 75
    assert slurm.depends == {job: (first_job,)}
    assert (slurm.show_job(job).state, slurm.show_job(job).restarts, run.result()) == ("PENDING", 1, None)
    assert (run.status().state, run.attempts()) == (RunState.REQUEUED, [])
    assert run.status().why == f"waits until run first/{first.id} has completed"
    complete(first, slurm)
    slurm.advance(200)
    slurm.start(job)
    assert start_job(run, slurm, Ranks(completes)) == 0


def test_a_follow_up_job_of_the_predecessor_is_waited_for(first: RunDir, slurm: FakeSlurm) -> None:
    run = waiting_for(slurm, first)
    (first_job,) = ownership.jobs_of(first)
    # The job that was waited for is over for good, and another one has taken the run over.
    slurm.cancel(first_job)
    taken_over = slurm.sbatch(["follow-up.sh"])
    first.write_owner(first.owner().replace(jobs=(first_job, taken_over), follow_ups=()))
    assert start_job(run, slurm) == 75
    assert slurm.depends[ownership.jobs_of(run)[0]] == (taken_over,)


def test_a_job_that_may_not_be_requeued_leaves_the_wait_to_its_follow_up_job(first: RunDir, slurm: FakeSlurm) -> None:
    run = waiting_for(slurm, first)
    (job,), (first_job,) = ownership.jobs_of(run), ownership.jobs_of(first)
    slurm.forbid_requeue(job)
    assert start_job(run, slurm) == 75
    follow_up, *_ = run.owner().follow_ups
    assert slurm.depends == {follow_up: (job, first_job)}
    assert run.status().state is RunState.REQUEUED, "by this the follow-up job knows that it is needed"


@pytest.mark.parametrize("state", [RunState.FAILED, RunState.STOPPED, RunState.CANCELLED])
def test_a_run_whose_predecessor_did_not_complete_ends_and_names_it(
    first: RunDir, slurm: FakeSlurm, state: RunState, capsys: pytest.CaptureFixture[str]
) -> None:
    run = waiting_for(slurm, first)
    write_ended(first, state, "a bad sample")
    assert start_job(run, slurm) == 1
    assert run.result().state is RunState.FAILED
    assert run.result().why.startswith(
        f"never started: run first/{first.id} is {state} (a bad sample); `toolkit resume"
    )
    assert run.attempts() == []
    with pytest.raises(RequestError, match=rf"run second/{run.id} is failed \(never started\); `toolkit resume"):
        awaited.find([run.id], "slurm", slurm.show_jobs)
    for command in ("why", "status"):
        cli.main([command, run.id])
        assert f"run first/{first.id} is {state} (a bad sample)" in capsys.readouterr().out


def test_a_predecessor_that_is_lost_is_told_when_its_result_had_time_to_arrive(first: RunDir, slurm: FakeSlurm) -> None:
    run = waiting_for(slurm, first)
    slurm.cancel(*ownership.jobs_of(first))
    assert start_job(run, slurm) == 1
    assert f"run first/{first.id} is lost" in run.result().why


def test_a_result_that_arrives_late_counts(first: RunDir, slurm: FakeSlurm, change_limits: ChangeLimits) -> None:
    run = waiting_for(slurm, first)
    slurm.cancel(*ownership.jobs_of(first))
    change_limits(files_lag_s=60.0)
    late = threading.Timer(0.1, write_ended, (first, RunState.COMPLETED, "completed"))
    late.start()
    assert start_job(run, slurm, Ranks(completes)) == 0
    late.join()


def test_a_controller_that_is_away_lets_the_job_go_back_and_look_again(slurm: FakeSlurm) -> None:
    run = waiting_for(slurm, submitted("first", slurm))

    def away(jobs: Sequence[str]) -> dict[str, None]:
        raise SlurmError("Unable to contact slurm controller")

    slurm.show_jobs = away  # type: ignore[assignment]
    assert start_job(run, slurm) == 75
    assert (slurm.depends, slurm.show_job(ownership.jobs_of(run)[0]).state) == ({}, "PENDING")


def test_a_run_that_is_cancelled_while_it_waits_is_cancelled(slurm: FakeSlurm) -> None:
    run = waiting_for(slurm, submitted("first", slurm))
    user_requests.record_intent(run, Intent.CANCEL)
    assert start_job(run, slurm) == 1
    assert (run.result().state, slurm.depends) == (RunState.CANCELLED, {})


def test_an_after_json_that_cannot_be_read_does_not_let_the_run_start_early(slurm: FakeSlurm) -> None:
    run = waiting_for(slurm, submitted("first", slurm))
    (run.path / "after.json").write_text('{"version": 1, "runs": [')
    with pytest.raises(RequestError, match=r"after\.json cannot be read"):
        start_job(run, slurm)
    (row,) = run_rows.status_rows([run])
    assert (row.state, "after.json cannot be read" in (row.why or "")) == ("unreadable", True)


def test_a_local_run_waits_for_the_result_and_is_stopped_by_a_request() -> None:
    first, run = local_run("first"), new_run("second")
    fsio.write_json(run.after_path, DependencyRecord(runs=(str(first.path),), sweeps=()).to_json())

    def supervise(ranks: Ranks) -> int:
        return Supervisor(run, JobConfig(), Allocation(("here",), (1,), 1), ranks, None).run()

    stopped = threading.Timer(0.1, user_requests.record_intent, (run, Intent.STOP))
    stopped.start()
    assert supervise(Ranks()) == 75
    assert run.result().state is RunState.STOPPED
    assert run.status().why
    user_requests.clear_intent(run)
    completed = threading.Timer(0.1, write_ended, (first, RunState.COMPLETED, "completed"))
    completed.start()
    assert supervise(Ranks(completes)) == 0


def test_a_sweep_is_waited_for_as_a_whole_by_the_id_of_its_array(slurm: FakeSlurm) -> None:
    sent = submit_sweep(slurm, "train.seed=0..2")
    run = waiting_for(slurm, "mine")
    assert run.dependencies().names() == ["sweep mine"]
    assert start_job(run, slurm) == 75
    (job,) = ownership.jobs_of(run)
    assert slurm.depends == {job: (sent.jobs[0],)}
    points = sent.sweep.points()
    for index, point in enumerate(points):
        # Two have completed, one was removed: none is left to wait for.
        ends = [(RunState.COMPLETED, "completed"), (RunState.COMPLETED, "completed"), (RunState.FAILED, "x")]
        write_ended(sent.sweep.run_of(point), *ends[index])
        slurm.start(f"{sent.jobs[0]}_{index}")
        slurm.finish(f"{sent.jobs[0]}_{index}")
    record = run.dependencies()
    assert awaited.prerequisites(record, slurm.show_jobs).ended
    shutil.rmtree(sent.sweep.run_of(points[2]).path)
    assert awaited.prerequisites(record, slurm.show_jobs).is_met


def test_the_points_of_a_sweep_wait_in_their_array_and_also_when_they_are_retried(
    first: RunDir, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = submit_with_after(slurm, first.id)
    assert f"--dependency=afterany:{ownership.jobs_of(first)[0]}" in slurm.submitted[sent.jobs[0]]
    run, second = [sent.sweep.run_of(point) for point in sent.sweep.points()]
    assert run.dependencies().names() == [f"run first/{first.id}"]
    # Its job looks as that of any other run does, and goes back behind the first run's job.
    slurm.start(f"{sent.jobs[0]}_0")
    assert start_job(run, slurm) == 75
    assert slurm.depends == {f"{sent.jobs[0]}_0": (ownership.jobs_of(first)[0],)}
    monkeypatch.setattr(commands, "Slurm", lambda: slurm)
    assert cli.main(["sweep", "status", "mine"]) == 0
    assert capsys.readouterr().out.count(f"waits until run first/{first.id} has completed") == 2
    # A point that is retried before it could start continues waiting.
    slurm.cancel(*ownership.jobs_of(second))
    (job,), _ = submission.retry(sent.sweep, sent.sweep.points()[1:], slurm)
    assert f"--dependency=afterany:{ownership.jobs_of(first)[0]}" in slurm.submitted[job]


def test_a_sweep_may_begin_with_a_run_that_is_waited_for(first: RunDir, slurm: FakeSlurm) -> None:
    sent = submit_with_after(slurm, first.id, init_from=first.id)
    assert {point.config.model.init_from for point in sent.points} == {str(first.path)}
    with pytest.raises(ConfigError, match=r"has no checkpoint in .*; if it works, wait for it with --after"):
        submit_with_after(slurm, name="other", init_from=first.id)


def submit_with_after(
    slurm: FakeSlurm, *names: str, name: str | None = None, init_from: str | None = None
) -> submission.Submitted:
    overrides = ["train.seed=0..1", *([f"model.init_from={init_from}"] if init_from else [])]
    asked = request.read("mine.yaml", overrides, Options(name=name))
    return submission.submit(asked, Path.cwd(), "slurm", slurm, after=names)


def test_what_cannot_be_waited_for_is_refused_before_anything_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = FakeSlurm()
    find = awaited.find
    with pytest.raises(RunNotFoundError, match="--after: no run 'nobody'"):
        find(["nobody"], "slurm", slurm.show_jobs)
    failed = submitted("failed", slurm)
    write_ended(failed, RunState.FAILED, "a bad sample")
    with pytest.raises(RequestError, match=rf"--after: run failed/{failed.id} is failed \(a bad sample\)"):
        find(["failed"], "local", slurm.show_jobs)
    lost = submitted("lost", slurm)
    slurm.cancel(*ownership.jobs_of(lost))
    with pytest.raises(RequestError, match=f"run lost/{lost.id} is lost"):
        find(["lost"], "slurm", slurm.show_jobs)
    going = submitted("going", slurm)
    with pytest.raises(RequestError, match="debug"):
        find(["going"], "debug", slurm.show_jobs)
    assert find([going.id], "slurm", slurm.show_jobs).runs == (str(going.path),)
    done = submitted("done", slurm)
    complete(done, slurm)
    assert find(["done"], "slurm", slurm.show_jobs) is None
    give(STRANGER, [going.path], monkeypatch)  # another user could write its result
    with pytest.raises(RequestError, match=f"--after: others could forge the result of {going.id}"):
        find(["going"], "slurm", slurm.show_jobs)


def test_a_job_of_slurm_cannot_wait_for_a_run_without_slurm() -> None:
    local_run("here")
    with pytest.raises(RequestError, match="on a machine without Slurm"):
        awaited.find(["here"], "slurm", FakeSlurm().show_jobs)
    assert awaited.find(["here"], "local", FakeSlurm().show_jobs) is not None


def test_a_sweep_that_would_wait_for_itself_is_refused(slurm: FakeSlurm) -> None:
    submit_sweep(slurm, "train.seed=0..2", name="one")
    with pytest.raises(RequestError, match="sweep one would wait for itself"):
        submit_with_after(slurm, "one", name="one")
    between = waiting_for(slurm, "one")
    with pytest.raises(RequestError, match=f"run second/{between.id} would wait for itself"):
        submit_with_after(slurm, between.id, name="one")
    assert submit_with_after(slurm, between.id, name="two").new == 2
    with pytest.raises(RequestError, match="sweep two would wait for itself"):
        submit_with_after(slurm, "two", name="one")


def test_a_failed_wait_is_resumed_only_when_the_predecessor_works_again(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = FakeSlurm()
    first = submitted("first", slurm)
    run = waiting_for(slurm, first)
    write_ended(first, RunState.FAILED, "a bad sample")
    start_job(run, slurm)
    slurm.finish(ownership.jobs_of(run)[0], exit_code=1)
    monkeypatch.setattr(resume_run, "Slurm", lambda: slurm)
    with pytest.raises(RequestError, match=f"--after: run first/{first.id} is failed"):
        resume_run.resume(run, executor="slurm")
    assert run.result().state is RunState.FAILED, "nothing has changed"


def test_a_run_may_begin_with_the_weights_of_one_that_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = FakeSlurm()
    monkeypatch.setattr(submit, "Slurm", lambda: slurm)
    first = submitted("first", slurm)
    older = RunDir(first.path.with_name("20260101-000000-00000000"))
    shutil.copytree(first.path, older.path)
    (older.checkpoints / "step-00000001").mkdir()
    (older.checkpoints / "step-00000001/manifest.json").touch()
    asked = ["model.init_from=first"]
    text = submit.dry_run("mine.yaml", asked, executor="local", after="first")
    assert f"init_from: {first.path}" in text
    assert f"# waits until run first/{first.id} has completed" in text
    fsio.remove_tree(older.path)
    with pytest.raises(RequestError, match=r"has no checkpoint in .*; if it works, wait for it with --after"):
        submit.dry_run("mine.yaml", asked, executor="local")


def test_status_says_what_a_run_waits_for(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = FakeSlurm()
    first = submitted("first", slurm)
    run = waiting_for(slurm, first)
    start_job(run, slurm)
    monkeypatch.setattr(run_rows, "ask_slurm", lambda ids: {i: job for i, job in slurm.show_jobs(ids).items() if job})
    assert cli.main(["status", run.id]) == 0
    assert f"\nwaits until run first/{first.id} has completed\n" in capsys.readouterr().out
    assert cli.main(["status", run.id, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["after"] == [f"run first/{first.id}"]
    assert cli.main(["why", run.id]) == 0
    assert f"waits until run first/{first.id} has completed" in capsys.readouterr().out
    # A run that is waited for is not removed.
    write_ended(first, RunState.COMPLETED, "completed")
    slurm.start(*ownership.jobs_of(first))
    slurm.finish(ownership.jobs_of(first)[0])
    assert cli.main(["rm", first.id]) == 2
    assert f"run {run.id}, which has not ended, needs run {first.id}" in capsys.readouterr().err
