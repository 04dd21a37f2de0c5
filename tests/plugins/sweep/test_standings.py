"""The states of a sweep's points, and how retry and stop treat them."""

import contextlib
import json
import shutil
import time

import pytest

from tests.plugins.sweep.test_submission import project, submit  # noqa: F401  # a fixture
from toolkit.base import fsio
from toolkit.base.errors import EXIT_DONE, EXIT_FAILED, EXIT_REQUEST, RequestError, RunNotFoundError
from toolkit.cli import main as cli
from toolkit.cli import run_rows
from toolkit.files import rundir
from toolkit.files.run_files import RunProgress, RunResult, RunState
from toolkit.files.rundir import RunDir
from toolkit.nodes.allocation import Allocation
from toolkit.plugins.site import reservations  # noqa: F401  # before Slurm is replaced: it asks the real one
from toolkit.plugins.sweep import rows, submission, sweep_folder
from toolkit.plugins.sweep.rows import PointRow
from toolkit.plugins.sweep.sweep_folder import SweepDir
from toolkit.plugins.testing.fake_slurm import FakeSlurm
from toolkit.run.attempt.journal import write_ended
from toolkit.run.job.nodes import Nodes, remembered
from toolkit.run.records import ownership, user_requests
from toolkit.run.submission import handle
from toolkit.slurm import commands, shared_queue


@pytest.fixture(autouse=True)
def slurm(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Return the Slurm that all commands ask. Each look asks it anew."""
    slurm = FakeSlurm(now=time.time())
    for module in (commands, submission, handle):
        monkeypatch.setattr(module, "Slurm", lambda: slurm)
    monkeypatch.setattr(shared_queue, "cache_dir", lambda: None)
    return slurm


def look(sweep: SweepDir) -> dict[int, PointRow]:
    return {each.point.values["train.seed"]: each for each in rows.of_points(sweep, run_rows.status_rows)}


def retry_all(sweep: SweepDir) -> list[str]:
    jobs, _ = submission.retry(sweep, [each.point for each in look(sweep).values() if each.is_to_retry])
    return jobs


def run_at(sweep: SweepDir, index: int) -> RunDir:
    return sweep.run_of(sweep.points()[index])


def start(sweep: SweepDir, slurm: FakeSlurm, index: int) -> RunDir:
    """Start a point's present job as Slurm does, up to its first status."""
    run = run_at(sweep, index)
    (job,) = ownership.jobs_of(run)
    slurm.start(job)
    run.write_owner(run.owner().replace(jobs=(job,), serves=True))
    run.write_status(run.status().replace(state=RunState.RUNNING, job_id=job, progress=RunProgress(5, 9)))
    return run


def fail(sweep: SweepDir, slurm: FakeSlurm, index: int) -> RunDir:
    run = start(sweep, slurm, index)
    write_ended(run, RunState.FAILED, "a bad sample")
    slurm.finish(ownership.jobs_of(run)[0], exit_code=1)
    return run


def test_all_points_are_looked_at_with_one_question_to_slurm(slurm: FakeSlurm) -> None:
    sent = submit(slurm, "train.seed=0..5")
    start(sent.sweep, slurm, 0)
    fail(sent.sweep, slurm, 1)
    slurm.cancel(f"{sent.jobs[0]}_2")
    slurm.cancel(f"{sent.jobs[0]}_3")
    slurm.forget(f"{sent.jobs[0]}_3")
    slurm.accounting = False
    forgotten = run_at(sent.sweep, 3)
    forgotten.write_status(forgotten.status().replace(updated=1.0))
    found = look(sent.sweep)
    assert {seed: each.state.split()[0] for seed, each in found.items()} == {
        0: "running", 1: "failed", 2: "cancelled", 3: "lost", 4: "queued", 5: "queued",
    }  # fmt: skip
    assert (found[1].why, found[4].row.job_id) == ("a bad sample", f"{sent.jobs[0]}_4")
    assert [seed for seed, each in found.items() if each.is_to_retry] == [1, 2, 3]
    assert slurm.asked_for_jobs.count(()) == 1
    # A controller that does not answer says nothing about a point that waits.
    slurm.is_up = False
    assert {each.state for seed, each in look(sent.sweep).items() if seed >= 4} == {"queued"}


def test_retry_submits_only_what_has_no_result_and_it_waits_again(slurm: FakeSlurm) -> None:
    sent = submit(slurm, "train.seed=0..3")
    failed = fail(sent.sweep, slurm, 0)
    Nodes(failed, Allocation(("node1",), (1,), 1), spare=0, allow_fewer=False).condemn("node1", "no answer")
    write_ended(start(sent.sweep, slurm, 1), RunState.COMPLETED, "completed")
    slurm.cancel(f"{sent.jobs[0]}_2")
    (job,) = retry_all(sent.sweep)
    _, second = sent.sweep.arrays().values()
    assert [point.values["train.seed"] for point in second.points] == [0, 2]
    assert "--array=0-1" in slurm.submitted[job]
    assert {seed: each.state for seed, each in look(sent.sweep).items()} == {
        0: "queued", 1: "completed", 2: "queued", 3: "queued",
    }  # fmt: skip
    assert (failed.result(), remembered(failed)) == (None, {})
    assert retry_all(sent.sweep) == []
    assert cli.main(["rm", failed.id]) == EXIT_REQUEST, "it waits in the queue"


def test_a_retry_that_slurm_refuses_leaves_the_points_as_they_are(slurm: FakeSlurm) -> None:
    sent = submit(slurm, "train.seed=0..1")
    run = fail(sent.sweep, slurm, 0)
    slurm.refuses_submissions = "AssocMaxSubmitJobLimit"
    with pytest.raises(RequestError, match=r"(?s)1 points are not submitted.*`toolkit sweep retry mine`"):
        retry_all(sent.sweep)
    found = look(sent.sweep)[0]
    assert (found.state, found.why, len(sent.sweep.arrays())) == ("failed", "a bad sample", 1)
    slurm.refuses_submissions = ""
    (job,) = retry_all(sent.sweep)
    assert ownership.jobs_of(run) == [f"{job}_0"]


def test_a_retry_that_was_interrupted_is_completed_by_the_next(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = submit(slurm, "train.seed=0..2")
    runs = [fail(sent.sweep, slurm, index) for index in range(2)]
    usual, note = slurm.sbatch, submission._note
    # Slurm has the job, and the submitter dies before it can record that.
    monkeypatch.setattr(submission, "_note", lambda *_: pytest.fail("killed"))
    with pytest.raises(pytest.fail.Exception):
        retry_all(sent.sweep)
    monkeypatch.setattr(submission, "_note", note)
    assert retry_all(sent.sweep) == []
    job = [*slurm.submitted][-1]
    assert [ownership.jobs_of(run) for run in runs] == [[f"{job}_0"], [f"{job}_1"]]
    # Slurm has it not.
    for run in runs:
        slurm.start(*ownership.jobs_of(run))
        write_ended(run, RunState.FAILED, "again")
        slurm.finish(ownership.jobs_of(run)[0], exit_code=1)
    monkeypatch.setattr(slurm, "sbatch", lambda _: pytest.fail("killed"))
    with pytest.raises(pytest.fail.Exception):
        retry_all(sent.sweep)
    monkeypatch.setattr(slurm, "sbatch", usual)
    (job,) = retry_all(sent.sweep)
    assert [ownership.jobs_of(run) for run in runs] == [[f"{job}_0"], [f"{job}_1"]]
    assert all(array.job_id is not None for array in sent.sweep.arrays().values())


def test_a_retry_takes_over_no_point_that_lives(slurm: FakeSlurm) -> None:
    sent = submit(slurm, "train.seed=0..6")
    failed, resumed, taken = (fail(sent.sweep, slurm, index) for index in range(3))
    # One has been resumed since the table was made, and one is being resumed at this moment.
    resumed.clear_result()
    owner = ownership.submit_as(resumed, "slurm", ownership.take(resumed, ownership.number_of(resumed)))
    ownership.take(taken, ownership.number_of(taken))
    damaged = start(sent.sweep, slurm, 3)
    (damaged.path / "owner.json").write_text("{")
    write_ended(start(sent.sweep, slurm, 4), RunState.COMPLETED, "completed")
    start(sent.sweep, slurm, 5)
    assert not look(sent.sweep)[3].is_to_retry
    jobs, ids = submission.retry(sent.sweep, sent.sweep.points())
    assert (len(jobs), ids) == (1, {sent.sweep.points()[0].id})
    assert ownership.jobs_of(failed) == [f"{jobs[0]}_0"]
    assert resumed.owner() == owner


def test_stop_reaches_what_was_interrupted(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = slurm.sbatch
    # Slurm has the first array, and not the second one.
    for call, number in ((lambda words: pytest.fail(usual(words)), 0), (lambda _: pytest.fail("killed"), 1)):
        monkeypatch.setattr(slurm, "sbatch", call)
        with pytest.raises(pytest.fail.Exception):
            submit(slurm, f"train.seed={2 * number}..{2 * number + 1}", name=f"sweep{number}")
    monkeypatch.setattr(slurm, "sbatch", usual)
    for number in range(2):
        sweep = sweep_folder.of_name(f"sweep{number}")
        assert submission.stop(sweep) == (2, 0, {})
        assert {each.state for each in look(sweep).values()} == {"stopped"}
        assert submit(slurm, f"train.seed={2 * number}..{2 * number + 1}", name=f"sweep{number}").jobs == []
        assert len(retry_all(sweep)) == 1
    assert [row.state for row in slurm.user_jobs()] == [*["CANCELLED"] * 2, *["PENDING"] * 4]


def test_stop_waits_for_a_submitter_that_is_at_work(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep, lock = submit(slurm, "train.seed=0..1").sweep, fsio.lock
    with contextlib.ExitStack() as other:
        other.enter_context(sweep.locked())
        # The other one ends once this one waits.
        monkeypatch.setattr(fsio, "lock", lambda path, options=0: (options or other.close(), lock(path, options))[1])
        assert submission.stop(sweep) == (2, 0, {})


def test_a_damaged_run_does_not_keep_others_from_being_stopped(
    slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = submit(slurm, "train.seed=0..4").sweep
    runs = [start(sweep, slurm, index) for index in range(4)]
    for run, name in zip(runs, ("result.json", "owner.json", "point.json"), strict=False):
        (run.path / name).write_text("{")
    assert cli.main(["sweep", "stop", "mine"]) == EXIT_FAILED
    said = capsys.readouterr()
    assert "cancelled while they waited: 1; asked to commit a checkpoint and end: 1" in said.out
    for run, name in zip(runs, ("result.json", "owner.json", "point.json"), strict=False):
        assert f"run {run.id} was asked to stop" in said.err
        assert f"{run.path / name} cannot be read" in said.err
    assert {user_requests.read_intent(run) for run in runs} == {user_requests.Intent.STOP}


def test_a_damaged_point_hides_no_other(slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    sent = submit(slurm, "train.seed=0..2")
    (run_at(sent.sweep, 1).path / "point.json").write_text("{")
    assert {seed: each.state for seed, each in look(sent.sweep).items()} == {0: "queued", 1: "unreadable", 2: "queued"}
    for words in (["status"], ["status", "--all"], ["status", "mine"], ["sweep", "status", "mine"]):
        assert "point.json" in printed(capsys, *words) or words == ["status"]


def test_stop_cancels_what_waits_and_asks_what_works(slurm: FakeSlurm) -> None:
    sent = submit(slurm, "train.seed=0..5")
    job = sent.jobs[0]
    started = [start(sent.sweep, slurm, index) for index in (0, 4)]
    slurm.suspend(f"{job}_4")
    requeued = start(sent.sweep, slurm, 5)
    requeued.write_status(requeued.status().replace(state=RunState.REQUEUED))
    slurm.requeue(f"{job}_5")
    assert submission.stop(sent.sweep) == (4, 2, {})
    assert slurm.sent == []
    states = [slurm.show_jobs([f"{job}_{index}"])[f"{job}_{index}"] for index in range(6)]
    assert [status and status.state for status in states] == [
        "RUNNING", *["CANCELLED"] * 3, "SUSPENDED", "CANCELLED",
    ]  # fmt: skip
    assert [each.state.split()[0] for each in look(sent.sweep).values()] == [
        "running", *["stopped"] * 3, "running", "stopped",
    ]  # fmt: skip
    assert {user_requests.read_intent(run) for run in started} == {user_requests.Intent.STOP}
    # A retry forgets the requests.
    (retried,) = retry_all(sent.sweep)
    assert "--array=0-3" in slurm.submitted[retried]
    assert user_requests.read_intent(run_at(sent.sweep, 1)) is None


def test_stop_leaves_a_run_that_has_just_started_to_its_job(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = submit(slurm, "train.seed=0..1")
    usual = slurm.cancel_waiting

    def late(jobs: list[str]) -> None:
        slurm.start(f"{sent.jobs[0]}_1")
        usual(jobs)

    monkeypatch.setattr(slurm, "cancel_waiting", late)
    assert submission.stop(sent.sweep) == (2, 0, {})
    run = run_at(sent.sweep, 1)
    assert (run.result(), user_requests.read_intent(run), slurm.sent) == (None, user_requests.Intent.STOP, [])


@pytest.mark.parametrize("how", ["cancel", "stop"])
def test_a_point_is_ended_like_any_other_run(slurm: FakeSlurm, how: str) -> None:
    sent = submit(slurm, "train.seed=0..1")
    run = run_at(sent.sweep, 0)
    assert cli.main([how, run.id]) == EXIT_DONE
    assert [row.state for row in slurm.user_jobs()] == ["CANCELLED", "PENDING"]
    assert [each.state.split()[0] for each in look(sent.sweep).values()] == [
        "cancelled" if how == "cancel" else "stopped", "queued",
    ]  # fmt: skip
    (job,) = retry_all(sent.sweep)
    assert ownership.jobs_of(run) == [f"{job}_0"]
    assert [each.state.split()[0] for each in look(sent.sweep).values()] == ["queued", "queued"]


@pytest.mark.parametrize("state", [RunState.COMPLETED, RunState.FAILED])
def test_a_point_whose_folder_was_removed_is_not_run_again(
    slurm: FakeSlurm, state: RunState, capsys: pytest.CaptureFixture[str]
) -> None:
    sent = submit(slurm, "train.seed=0..1")
    run = start(sent.sweep, slurm, 0)
    write_ended(run, state, "as the test wants")
    slurm.finish(ownership.jobs_of(run)[0], exit_code=state is RunState.FAILED)
    shutil.rmtree(run.path)
    assert {seed: (each.state, each.is_to_retry) for seed, each in look(sent.sweep).items()} == {
        0: ("removed", False), 1: ("queued", False),
    }  # fmt: skip
    assert cli.main(["sweep", "retry", "mine"]) == EXIT_DONE
    told = capsys.readouterr().out
    assert "its run folder was removed, so it is not run again" in told
    assert "nothing was submitted" in told
    assert submit(slurm, "train.seed=0..1").new == 0


def test_a_lost_point_is_retried_once_and_its_new_job_counts(slurm: FakeSlurm) -> None:
    sent = submit(slurm, "train.seed=0..0")
    run = start(sent.sweep, slurm, 0)
    run.write_status(run.status().replace(updated=1.0))
    slurm.forbid_requeue(f"{sent.jobs[0]}_0")
    slurm.fail_node(f"{sent.jobs[0]}_0")
    found = look(sent.sweep)[0]
    assert (found.state, found.is_to_retry) == ("lost (NODE_FAIL)", True)
    (job,) = retry_all(sent.sweep)
    found = look(sent.sweep)[0]
    assert (found.state, found.row.job_id, found.is_to_retry) == ("queued", f"{job}_0", False)
    assert submission.stop(sent.sweep) == (1, 0, {})
    assert [row.state for row in slurm.user_jobs()] == ["NODE_FAIL", "CANCELLED"]


def test_points_of_different_sizes_are_retried_in_arrays_of_their_own(slurm: FakeSlurm) -> None:
    sent = submit(slurm, "cluster.nodes=1,2", "train.seed=0..1")
    points = sent.sweep.points()
    submission.stop(sent.sweep)
    jobs, _ = submission.retry(sent.sweep, [points[index] for index in (0, 2, 1, 3)])
    retried = [*sent.sweep.arrays().items()][2:]
    assert len(jobs) == len(retried) == 2
    for path, array in retried:
        size = path.with_suffix(".sh").read_text().split("--nodes=")[1].split("\n")[0]
        assert [str(point.values["cluster.nodes"]) for point in array.points] == [size, size]


def test_a_list_that_cannot_be_read_is_named_and_no_data_printed(
    slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    sent = submit(slurm, "train.seed=0..2")
    (sent.sweep.path / "arrays/0002-x.json").write_text("{\n")
    for arguments in (["export"], ["export", "--json"], ["status", "--json"], ["status"]):
        assert cli.main(["sweep", arguments[0], "mine", *arguments[1:]]) == 2
        captured = capsys.readouterr()
        assert (captured.out, "0002-x.json cannot be read: it is not JSON" in captured.err) == ("", True)


def test_best_and_export_tell_what_the_results_say(slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    sent = submit(slurm, "train.seed=0..2")
    for index, (accuracy, loss) in enumerate(((0.5, 0.1), (0.9, 0.3), (0.7, 0.2))):
        run = start(sent.sweep, slurm, index)
        metrics = {"eval/accuracy": accuracy, "eval/loss": loss}
        run.write_result(RunResult(RunState.COMPLETED, attempts=1, step=9, metrics=metrics))
    assert cli.main(["sweep", "best", "mine", "--json"]) == 0
    assert [row["values"]["train.seed"] for row in json.loads(capsys.readouterr().out)] == [1, 2, 0]
    assert cli.main(["sweep", "best", "mine", "--metric=-eval/loss", "--json"]) == 0
    assert [row["values"]["train.seed"] for row in json.loads(capsys.readouterr().out)] == [0, 2, 1]
    assert cli.main(["sweep", "best", "mine", "--metric", "eval/f1"]) == 2
    assert "there are: eval/accuracy, eval/loss" in capsys.readouterr().err
    assert cli.main(["sweep", "export", "mine"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "run,point,state,train.seed,step,eval/accuracy,eval/loss"
    expected = ["completed,0,9,0.5,0.1", "completed,1,9,0.9,0.3", "completed,2,9,0.7,0.2"]
    assert [line.split(",", 2)[2] for line in lines[1:]] == expected


def test_a_damaged_run_is_a_row_like_others(slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    sent = submit(slurm, "train.seed=0..2")
    start(sent.sweep, slurm, 0)
    run = start(sent.sweep, slurm, 1)
    (run.path / "result.json").write_text("\0\0\0")
    found = look(sent.sweep)
    assert (found[0].state.split()[0], found[1].state, len(found)) == ("running", "unreadable", 3)
    assert cli.main(["sweep", "status", "mine"]) == 0
    assert "result.json" in capsys.readouterr().out


def test_an_unknown_sweep_is_refused_with_those_there_are(slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    submit(slurm, "train.seed=0..2")
    assert cli.main(["sweep", "status", "mien"]) == 2
    assert "did you mean 'mine'" in capsys.readouterr().err
    assert cli.main(["sweep", "status"]) == 2


@pytest.fixture
def listed(slurm: FakeSlurm) -> SweepDir:
    """Submit a sweep of six points, of which one runs, one has failed, and the others wait."""
    sweep = submit(slurm, "train.seed=0..5", name="seeds").sweep
    start(sweep, slurm, 0)
    fail(sweep, slurm, 1)
    return sweep


def printed(capsys: pytest.CaptureFixture[str], *words: str, code: int = EXIT_DONE) -> str:
    assert cli.main(list(words)) == code
    said = capsys.readouterr()
    return said.out + said.err


def test_a_sweep_is_one_row_of_the_listing_that_unfolds(listed: SweepDir, capsys: pytest.CaptureFixture[str]) -> None:
    _, row, note = printed(capsys, "status").splitlines()
    assert row.split()[:5] == ["seeds", "sweep", "of", "6", "running"]
    assert note == "4 queued, 1 running, 1 failed; `toolkit sweep status seeds` lists them"
    (data,) = json.loads(printed(capsys, "status", "--json"))
    assert data["points"] == {"queued": 4, "running": 1, "failed": 1}
    # Its name, its config's name and a filter list each point.
    for words in (["seeds"], ["mine"], ["--name", "mine"], ["--all"], ["--state", "queued,running,failed"]):
        found = json.loads(printed(capsys, "status", "--json", *words))
        assert sorted(each["state"].split()[0] for each in found) == ["failed", *["queued"] * 4, "running"], words
    queued = json.loads(printed(capsys, "status", "--json", "--state", "queued"))
    assert {each["job_id"] for each in queued} == {ownership.jobs_of(run_at(listed, index))[0] for index in range(2, 6)}
    # A sweep that cannot be read hides nothing.
    (listed.path / "sweep.json").write_text("{")
    assert len(printed(capsys, "status").splitlines()) > 6


def test_a_name_that_a_sweep_made_ambiguous_is_refused_until_a_newer_run_has_it(
    listed: SweepDir, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("why", "cancel", "evaluate", "logs"):
        said = printed(capsys, command, "mine", code=EXIT_REQUEST)
        assert "'mine' names the points of sweep seeds: `toolkit sweep status seeds` lists their runs" in said
    run = run_at(listed, 5)
    assert rundir.find(run.id[-8:]) == run
    # A single run of the same name that was submitted later is what the name means.
    newer = rundir.RunDir(rundir.runs_root() / "mine" / f"{rundir.id_time(time.time() + 60)}-00000000")
    newer.path.mkdir(parents=True)
    newer.config.write_text("")
    assert rundir.find("mine") == newer


@pytest.mark.usefixtures("listed")
def test_a_sweep_with_a_name_of_its_own_leaves_the_configs_name_to_an_earlier_run() -> None:
    earlier = rundir.RunDir(rundir.runs_root() / "mine" / "20260101-000000-00000000")
    earlier.path.mkdir(parents=True)
    earlier.config.write_text("")
    assert rundir.find("mine") == earlier
    with pytest.raises(RunNotFoundError, match="'seeds' names the points of sweep seeds"):
        rundir.find("seeds")


def test_a_point_says_in_words_what_it_waits_for(slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    sent = submit(slurm, "train.seed=0..1")
    for job in (f"{sent.jobs[0]}_0", f"{sent.jobs[0]}_1"):
        slurm._set(slurm._one(job), reason="JobArrayTaskLimit")
    words = "as many elements of its array run as it allows (JobArrayTaskLimit)"
    assert {each.why for each in look(sent.sweep).values()} == {words}
    assert words in printed(capsys, "sweep", "status", "mine")


def test_a_sweep_is_completed_only_where_no_point_is_in_another_state() -> None:
    assert {*RunState} - {*rows._IMPORTANCE} == {RunState.COMPLETED}
