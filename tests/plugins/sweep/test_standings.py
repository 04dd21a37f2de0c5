"""The states of a sweep's points, and how retry and stop treat them."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest

from tests.plugins.sweep.test_submission import project, submit  # noqa: F401  # a fixture
from toolkit.base import reading
from toolkit.base.errors import EXIT_DONE, EXIT_REQUEST, RunNotFoundError
from toolkit.cli import main as cli
from toolkit.cli import show
from toolkit.cli.run_rows import RunRow
from toolkit.files import rundir
from toolkit.files.run_files import RunProgress, RunResult, RunState
from toolkit.nodes.allocation import Allocation
from toolkit.plugins.sweep import again, element, states, sweep_folder
from toolkit.plugins.sweep.states import PointStanding, standings
from toolkit.plugins.sweep.sweep_folder import SweepDir
from toolkit.plugins.testing.fake_slurm import FakeSlurm
from toolkit.run.attempt.journal import write_ended
from toolkit.run.job.nodes import Nodes, remembered
from toolkit.run.records import ownership, stop_request
from toolkit.run.submission import handle
from toolkit.slurm import commands, shared_queue
from toolkit.slurm.jobs import JobStatus
from toolkit.slurm.shared_queue import SharedQueue


def look(sweep: SweepDir, slurm: FakeSlurm) -> dict[int, PointStanding]:
    queue = SharedQueue(slurm, None)
    found = standings(sweep, queue.show_jobs, show.status_rows)
    return {each.point.values["train.seed"]: each for each in found}


def start(sweep: SweepDir, slurm: FakeSlurm, index: int) -> None:
    """Start an element as Slurm does, up to its first status."""
    (array,) = sweep.arrays()
    record = array.record()
    assert record is not None
    slurm.start(f"{record.job_id}_{index}")
    run = element.claim(array, index, record.token)
    assert run is not None
    owner = ownership.submit_as(run, "slurm", ownership.take(run, 0), record.token)
    run.write_owner(owner.replace(jobs=(f"{record.job_id}_{index}",)))
    progress = RunProgress(step=5, total_steps=9)
    run.write_status(run.status().replace(state=RunState.RUNNING, job_id=f"{record.job_id}_{index}", progress=progress))


def test_all_points_are_looked_at_with_one_question_to_slurm() -> None:
    slurm = FakeSlurm()
    sent = submit(slurm, "train.seed=0..5")
    start(sent.sweep, slurm, 0)
    start(sent.sweep, slurm, 1)
    run = sent.sweep.run_of(sent.sweep.arrays()[0].points()[1])
    write_ended(run, RunState.FAILED, "a bad sample")
    slurm.finish(f"{sent.jobs[0]}_1", exit_code=1)
    slurm.cancel(f"{sent.jobs[0]}_2")
    slurm.cancel(f"{sent.jobs[0]}_3")
    slurm.forget(f"{sent.jobs[0]}_3")
    slurm.accounting = False
    found = look(sent.sweep, slurm)
    assert {seed: each.state.split()[0] for seed, each in found.items()} == {
        0: "running", 1: "failed", 2: "cancelled", 3: "lost", 4: "queued", 5: "queued",
    }  # fmt: skip
    assert found[1].why == "a bad sample"
    assert [seed for seed, each in found.items() if each.is_to_retry] == [1, 2, 3]
    assert slurm.asked_for_jobs.count(()) == 1
    # A controller that does not answer says nothing about a point that waits.
    slurm.is_up = False
    assert {each.state for seed, each in look(sent.sweep, slurm).items() if seed >= 2} == {"queued"}


def test_the_files_of_a_list_are_read_once_whatever_the_number_of_its_points(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm, read = FakeSlurm(), list[str]()
    sent = submit(slurm, "train.seed=0..9")
    usual = reading.read_bytes
    monkeypatch.setattr(reading, "read_bytes", lambda path, most: read.append(path.name) or usual(path, most))
    assert len(look(sent.sweep, slurm)) == 10
    assert sorted(read) == ["0001.json", "0001.jsonl"]


def test_a_point_that_waits_to_be_retried_is_not_removed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm = FakeSlurm()
    monkeypatch.setattr(commands, "Slurm", lambda: slurm)
    monkeypatch.setattr(shared_queue, "cache_dir", lambda: None)  # each look asks anew
    sent = submit(slurm, "train.seed=0..1")
    start(sent.sweep, slurm, 0)
    run = sent.sweep.run_of(sent.sweep.arrays()[0].points()[0])
    write_ended(run, RunState.FAILED, "as the test wants")
    slurm.finish(f"{sent.jobs[0]}_0", exit_code=1)
    assert not states.may_start_again(run, SharedQueue(slurm, None).show_jobs)
    (job,) = again.retry(sent.sweep, [look(sent.sweep, slurm)[0]], slurm)
    assert cli.main(["rm", run.id]) == EXIT_REQUEST
    assert f"run {run.id} was submitted again by its sweep" in capsys.readouterr().err
    slurm.is_up = False
    assert cli.main(["rm", run.id]) == EXIT_REQUEST, "nothing is known"
    slurm.is_up = True
    slurm.cancel(f"{job}_0")
    assert cli.main(["rm", run.id]) == EXIT_DONE
    assert not run.path.exists()


def test_retry_submits_only_what_has_failed_and_it_waits_again() -> None:
    slurm = FakeSlurm()
    sent = submit(slurm, "train.seed=0..3")
    for index, state in ((0, RunState.FAILED), (1, RunState.COMPLETED)):
        start(sent.sweep, slurm, index)
        write_ended(sent.sweep.run_of(sent.sweep.arrays()[0].points()[index]), state, "as the test wants")
        slurm.finish(f"{sent.jobs[0]}_{index}", exit_code=index == 0)
    slurm.cancel(f"{sent.jobs[0]}_2")
    found = look(sent.sweep, slurm)
    jobs = again.retry(sent.sweep, [each for each in found.values() if each.is_to_retry], slurm)
    _, second = sent.sweep.arrays()
    assert [point.values["train.seed"] for point in second.points()] == [0, 2]
    assert "--array=0-1" in slurm.submitted[jobs[0]]
    assert {seed: each.state for seed, each in look(sent.sweep, slurm).items()} == {
        0: "queued", 1: "completed", 2: "queued", 3: "queued",
    }  # fmt: skip
    assert not any(each.is_to_retry for each in look(sent.sweep, slurm).values())


def test_stop_cancels_what_waits_and_asks_what_works_in_two_calls() -> None:
    slurm = FakeSlurm()
    sent = submit(slurm, "train.seed=0..4")
    job = sent.jobs[0]
    for index in (0, 4):
        start(sent.sweep, slurm, index)
    slurm.suspend(f"{job}_4")
    assert again.stop(sent.sweep, list(look(sent.sweep, slurm).values()), slurm) == (3, 2)
    assert slurm.sent == []
    states = [slurm.show_jobs([f"{job}_{index}"])[f"{job}_{index}"] for index in range(5)]
    assert [status and status.state for status in states] == ["RUNNING", *["CANCELLED"] * 3, "SUSPENDED"]
    for index in (0, 4):
        run = sent.sweep.run_of(sent.sweep.arrays()[0].points()[index])
        assert (run.path / "intent.json").exists()


def test_stop_leaves_a_run_that_has_just_started_to_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = FakeSlurm()
    sent = submit(slurm, "train.seed=0..2")
    earlier = list(look(sent.sweep, slurm).values())
    start(sent.sweep, slurm, 0)
    slurm.start(f"{sent.jobs[0]}_1")  # it has no folder yet
    assert again.stop(sent.sweep, earlier, slurm) == (3, 0)
    # Neither is done: both are asked to end, and the run's result is its supervisor's to write.
    assert slurm.sent == []
    begun, starting = [sent.sweep.run_of(point) for point in sent.sweep.arrays()[0].points()[:2]]
    for run in (starting, begun):
        assert (run.result(), stop_request.asked(run)) == (None, stop_request.Intent.STOP)
    # An earlier version has written such results. Its job has the run still.
    write_ended(run, RunState.STOPPED, "stopped while it waited in the queue")
    for module in (again, commands):
        monkeypatch.setattr(module, "Slurm", lambda: slurm)
    monkeypatch.setattr(element, "ENDING_S", 0.0)
    retry_all(sent.sweep, slurm)
    retried = sent.sweep.arrays()[-1]
    record = retried.record()
    assert record is not None
    assert element.claim(retried, 0, record.token) is None
    slurm.finish(f"{sent.jobs[0]}_0")
    assert element.claim(retried, 0, record.token) == run


def test_stop_writes_the_result_of_a_requeued_run_that_it_cancels() -> None:
    slurm = FakeSlurm()
    sent = submit(slurm, "train.seed=0..1")
    start(sent.sweep, slurm, 0)
    run = sent.sweep.run_of(sent.sweep.arrays()[0].points()[0])
    run.write_status(run.status().replace(state=RunState.REQUEUED))
    slurm.requeue(f"{sent.jobs[0]}_0")
    assert again.stop(sent.sweep, list(look(sent.sweep, slurm).values()), slurm) == (2, 0)
    result = run.result()
    assert (result and result.state, slurm.sent) == (RunState.STOPPED, [])


def test_a_point_stopped_before_it_had_an_owner_goes_on_with_a_retry() -> None:
    slurm = FakeSlurm()
    sent = submit(slurm, "train.seed=0..1")
    (array,) = sent.sweep.arrays()
    record = array.record()
    assert record is not None
    run = element.claim(array, 0, record.token)  # and the job was requeued at this moment
    assert run is not None
    assert again.stop(sent.sweep, list(look(sent.sweep, slurm).values()), slurm) == (2, 0)
    result = run.result()
    assert (result and result.state) == RunState.STOPPED
    assert [row.state for row in slurm.user_jobs()] == ["CANCELLED", "CANCELLED"]
    Nodes(run, Allocation(("node1",), (1,), 1), spare=0, allow_fewer=False).condemn("node1", "no answer")
    retry_all(sent.sweep, slurm)
    retried = sent.sweep.arrays()[-1]
    record = retried.record()
    assert record is not None
    assert element.claim(retried, 0, record.token) == run
    assert (run.result(), stop_request.asked(run), remembered(run)) == (None, None, {})


def test_a_point_stopped_without_an_owner_waits_again_after_a_retry() -> None:
    slurm = FakeSlurm()
    sent = submit(slurm, "train.seed=0..0")
    (array,) = sent.sweep.arrays()
    record = array.record()
    assert record is not None
    element.claim(array, 0, record.token)
    again.stop(sent.sweep, list(look(sent.sweep, slurm).values()), slurm)
    assert look(sent.sweep, slurm)[0].state == "stopped"
    time.sleep(0.01)  # a tick of the file system's clock
    (job,) = retry_all(sent.sweep, slurm)
    found = look(sent.sweep, slurm)[0]
    assert (found.state, found.job_id, found.is_to_retry) == ("queued", f"{job}_0", False)
    assert retry_all(sent.sweep, slurm) == []


@pytest.mark.parametrize("state", [RunState.COMPLETED, RunState.FAILED])
def test_a_point_whose_folder_was_removed_is_not_run_again(
    state: RunState, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm = FakeSlurm()
    monkeypatch.setattr(commands, "Slurm", lambda: slurm)
    monkeypatch.setattr(again, "Slurm", lambda: slurm)
    sent = submit(slurm, "train.seed=0..1")
    start(sent.sweep, slurm, 0)
    run = sent.sweep.run_of(sent.sweep.arrays()[0].points()[0])
    write_ended(run, state, "as the test wants")
    slurm.finish(f"{sent.jobs[0]}_0", exit_code=state is RunState.FAILED)
    shutil.rmtree(run.path)
    found = look(sent.sweep, slurm)
    assert {seed: (each.state, each.is_to_retry) for seed, each in found.items()} == {
        0: ("removed", False), 1: ("queued", False),
    }  # fmt: skip
    assert cli.main(["sweep", "retry", "mine"]) == EXIT_DONE
    told = capsys.readouterr().out
    assert "its run folder was removed, so it is not run again" in told
    assert "nothing was submitted" in told
    # Nor does a job that Slurm starts once more make it anew.
    (array,) = sent.sweep.arrays()
    record = array.record()
    assert record is not None
    assert element.claim(array, 0, record.token) is None
    assert not run.path.exists()


def retry_all(sweep: SweepDir, slurm: FakeSlurm) -> list[str]:
    return again.retry(sweep, [each for each in look(sweep, slurm).values() if each.is_to_retry], slurm)


def lost_run(slurm: FakeSlurm) -> SweepDir:
    """Return a sweep of one point whose node died a while ago. Its run has no result."""
    sent = submit(slurm, "train.seed=0..0")
    start(sent.sweep, slurm, 0)
    run = sent.sweep.run_of(sent.sweep.arrays()[0].points()[0])
    run.write_status(run.status().replace(updated=1.0))
    slurm.forbid_requeue(f"{sent.jobs[0]}_0")
    slurm.fail_node(f"{sent.jobs[0]}_0")
    return sent.sweep


def test_a_lost_point_is_retried_once_and_its_new_job_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = FakeSlurm()
    monkeypatch.setattr(show, "ask_slurm", lambda ids: {i: job for i, job in slurm.show_jobs(ids).items() if job})
    sweep = lost_run(slurm)
    found = look(sweep, slurm)[0]
    assert (found.state, found.is_to_retry) == ("lost (NODE_FAIL)", True)
    (job,) = retry_all(sweep, slurm)
    found = look(sweep, slurm)[0]
    assert (found.state, found.job_id, found.is_to_retry) == ("queued", f"{job}_0", False)
    assert retry_all(sweep, slurm) == []
    assert again.stop(sweep, [found], slurm) == (1, 0)
    assert [row.state for row in slurm.user_jobs()] == ["NODE_FAIL", "CANCELLED"]
    # a retry that was cancelled while it waited may be made again
    (job,) = retry_all(sweep, slurm)
    slurm.start(f"{job}_0")
    found = look(sweep, slurm)[0]
    assert (found.state, found.job_id, found.is_to_retry) == ("starting", f"{job}_0", False)
    assert again.stop(sweep, [found], slurm) == (0, 1)
    assert stop_request.asked(found.run) is stop_request.Intent.STOP


@pytest.mark.parametrize("how", ["cancel", "stop"])
def test_a_point_that_its_sweep_is_to_run_again_can_be_told_not_to(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    slurm = FakeSlurm()
    for module in (again, commands):
        monkeypatch.setattr(module, "Slurm", lambda: slurm)
    sent = submit(slurm, "train.seed=0..1")
    runs = [sent.sweep.run_of(point) for point in sent.sweep.arrays()[0].points()]
    for index, run in enumerate(runs):
        start(sent.sweep, slurm, index)
        write_ended(run, RunState.FAILED, "as the test wants")
        slurm.finish(f"{sent.jobs[0]}_{index}", exit_code=1)
    slurm.advance(60)
    assert not handle.withdraw_retry(runs[0])
    (job,) = retry_all(sent.sweep, slurm)
    capsys.readouterr()
    assert cli.main([how, runs[0].id]) == EXIT_DONE
    assert "was to be run again by its sweep, and is not any more; it stays failed" in capsys.readouterr().out
    getattr(handle.attach(runs[1]), how)()
    assert [row.state for row in slurm.user_jobs() if row.job_id.startswith(f"{job}_")] == ["CANCELLED"] * 2
    assert [(each.state, each.is_to_retry) for each in look(sent.sweep, slurm).values()] == [("failed", True)] * 2
    assert cli.main([how, runs[0].id]) == EXIT_DONE
    assert "has already ended: failed" in capsys.readouterr().out
    # The next retry runs both again: no request is left.
    assert retry_all(sent.sweep, slurm) != []
    assert [stop_request.asked(run) for run in runs] == [None, None]


def test_a_lost_point_keeps_its_own_word_while_slurm_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = FakeSlurm()
    monkeypatch.setattr(show, "ask_slurm", lambda ids: {})
    sweep = lost_run(slurm)
    point = PointStanding(sweep.arrays()[0].points()[0], sweep.run_of(sweep.arrays()[0].points()[0]), "lost")
    again.retry(sweep, [point], slurm)
    slurm.is_up = False
    assert look(sweep, slurm)[0].state == "running? (silent)"


def test_stop_after_a_retry_asks_slurm_about_jobs_that_are_gone() -> None:
    slurm = FakeSlurm(accounting=False)
    sent = submit(slurm, "train.seed=0..1")
    start(sent.sweep, slurm, 0)
    write_ended(sent.sweep.run_of(sent.sweep.arrays()[0].points()[0]), RunState.FAILED, "as the test wants")
    slurm.finish(f"{sent.jobs[0]}_0", exit_code=1)
    slurm.cancel(f"{sent.jobs[0]}_1")
    retry_all(sent.sweep, slurm)
    slurm.forget(sent.jobs[0])
    assert again.stop(sent.sweep, list(look(sent.sweep, slurm).values()), slurm) == (2, 0)
    assert [row.state for row in slurm.user_jobs()] == ["CANCELLED", "CANCELLED"]
    # A run of a status without a job, as a supervisor without Slurm leaves it, has none to signal.
    run = sent.sweep.run_of(sent.sweep.arrays()[0].points()[0])
    working = PointStanding(
        sent.sweep.arrays()[0].points()[0],
        run,
        "running",
        row=RunRow(run.id, run.name, str(run.path), executor="slurm"),
    )
    (run.path / "owner.json").unlink()
    run.write_status(run.status().replace(job_id=None))
    assert again.stop(sent.sweep, [working], slurm) == (0, 1)


def test_points_of_different_sizes_are_retried_in_arrays_of_their_own() -> None:
    slurm = FakeSlurm()
    sent = submit(slurm, "cluster.nodes=1,2", "train.seed=0..1")
    points = [point for array in sent.sweep.arrays() for point in array.points()]
    points = [points[0], points[2], points[1], points[3]]
    jobs = again.retry(sent.sweep, [PointStanding(each, sent.sweep.run_of(each), "lost") for each in points], slurm)
    retried = sent.sweep.arrays()[2:]
    assert len(jobs) == len(retried) == 2
    for array in retried:
        size = array.script.read_text().split("--nodes=")[1].split("\n")[0]
        assert [str(point.values["cluster.nodes"]) for point in array.points()] == [size, size]


def test_a_list_of_points_that_cannot_be_read_is_refused_and_hides_no_other_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sent = submit(FakeSlurm(), "train.seed=0..2")
    with sent.sweep.arrays()[0].points_path.open("a") as file:
        file.write("{}\n")
    for arguments in (["export"], ["export", "--json"], ["status", "--json"], ["status"]):
        assert cli.main(["sweep", arguments[0], "mine", *arguments[1:]]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert "0001.jsonl, line 4, cannot be read: id: this key is missing" in captured.err
    assert cli.main(["status", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["run"], row["state"]) == ("mine", "unreadable")
    assert row["why"].startswith("arrays/0001.jsonl, line 4, cannot be read")


def test_best_and_export_tell_what_the_results_say(capsys: pytest.CaptureFixture[str]) -> None:
    slurm = FakeSlurm()
    sent = submit(slurm, "train.seed=0..2")
    for index, (accuracy, loss) in enumerate(((0.5, 0.1), (0.9, 0.3), (0.7, 0.2))):
        start(sent.sweep, slurm, index)
        run = sent.sweep.run_of(sent.sweep.arrays()[0].points()[index])
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


def test_a_run_that_cannot_be_read_is_a_row_like_others(capsys: pytest.CaptureFixture[str]) -> None:
    slurm = FakeSlurm()
    sent = submit(slurm, "train.seed=0..2")
    start(sent.sweep, slurm, 0)
    start(sent.sweep, slurm, 1)
    run = sent.sweep.run_of(sent.sweep.arrays()[0].points()[1])
    (run.path / "result.json").write_text("\0\0\0")
    found = look(sent.sweep, slurm)
    assert (found[0].state.split()[0], found[1].state, len(found)) == ("running", "unreadable", 3)
    assert cli.main(["sweep", "status", "mine"]) == 0
    assert "result.json" in capsys.readouterr().out


def test_an_unknown_sweep_is_refused_with_those_there_are(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    submit(FakeSlurm(), "train.seed=0..2")
    assert cli.main(["sweep", "status", "mien"]) == 2
    assert "did you mean 'mine'" in capsys.readouterr().err
    assert cli.main(["sweep", "status"]) == 2


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Submit a sweep of six points, of which one runs, one has failed, and the others wait."""
    slurm = FakeSlurm(now=time.time())
    monkeypatch.setattr(commands, "Slurm", lambda: slurm)
    monkeypatch.setattr(shared_queue, "cache_dir", lambda: None)
    sent = submit(slurm, "train.seed=0..5", name="seeds")
    start(sent.sweep, slurm, 0)
    start(sent.sweep, slurm, 1)
    write_ended(sent.sweep.run_of(sent.sweep.arrays()[0].points()[1]), RunState.FAILED, "a bad sample")
    slurm.finish(f"{sent.jobs[0]}_1", exit_code=1)
    return slurm


def printed(capsys: pytest.CaptureFixture[str], *words: str, code: int = EXIT_DONE) -> str:
    assert cli.main(list(words)) == code
    said = capsys.readouterr()
    return said.out + said.err


def test_a_sweep_is_one_row_of_the_listing_that_unfolds(listed: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    _, row, note = printed(capsys, "status").splitlines()
    assert row.split()[:5] == ["seeds", "sweep", "of", "6", "running"]
    assert note == "4 queued, 1 running, 1 failed; `toolkit sweep status seeds` lists them"
    (data,) = json.loads(printed(capsys, "status", "--json"))
    assert data["points"] == {"queued": 4, "running": 1, "failed": 1}
    # Its name, its config's name and a filter list each point, also those that have not started.
    for words in (["seeds"], ["mine"], ["--name", "mine"], ["--all"], ["--state", "queued,running,failed"]):
        rows = json.loads(printed(capsys, "status", "--json", *words))
        assert sorted(each["state"].split()[0] for each in rows) == ["failed", *["queued"] * 4, "running"], words
    queued = json.loads(printed(capsys, "status", "--json", "--state", "queued"))
    assert {each["name"] for each in queued} == {"mine"}
    (array,) = sweep_folder.of_name("seeds").arrays()
    jobs = [array.job_of(point, index, array.record()) for index, point in array.by_index().items() if index >= 2]
    assert {each["job_id"] for each in queued} == {job.ids[0] for job in jobs if job is not None}


def test_a_name_that_a_sweep_made_ambiguous_is_refused_until_a_newer_run_has_it(
    listed: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("why", "cancel", "evaluate", "logs"):
        said = printed(capsys, command, "mine", code=EXIT_REQUEST)
        assert "'mine' names the points of sweep seeds: `toolkit sweep status seeds` lists their runs" in said
    points = sweep_folder.of_name("seeds").arrays()[0].points()
    assert rundir.find(points[0].run[-8:]).id == points[0].run.rpartition("/")[2]
    waits = points[5].run.rpartition("/")[2]
    for text in (waits, waits[-8:], points[5].run):
        said = printed(capsys, "why", text, code=EXIT_REQUEST)
        assert f"run {waits} is a point of sweep seeds that has not started" in said
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


def test_a_sweep_of_which_nothing_has_started_is_found_by_its_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = FakeSlurm(now=time.time())
    monkeypatch.setattr(commands, "Slurm", lambda: slurm)
    monkeypatch.setattr(shared_queue, "cache_dir", lambda: None)
    submit(slurm, "train.seed=0..2")
    assert "sweep of 3" in printed(capsys, "status")
    assert "names the points of sweep mine" in printed(capsys, "stop", "mine", code=EXIT_REQUEST)
    assert len(json.loads(printed(capsys, "status", "mine", "--json"))) == 3


def test_a_point_says_in_words_what_it_waits_for() -> None:
    slurm = FakeSlurm()
    sent = submit(slurm, "train.seed=0..1")
    waiting = {
        f"{sent.jobs[0]}_{index}": JobStatus(f"{sent.jobs[0]}_{index}", "PENDING", "JobArrayTaskLimit")
        for index in (0, 1)
    }
    found = standings(sent.sweep, lambda _: waiting, show.status_rows)
    assert {each.why for each in found} == {"as many elements of its array run as it allows (JobArrayTaskLimit)"}


def test_a_stop_of_a_retried_point_is_heard_by_the_job_that_starts_at_that_moment() -> None:
    """The request is written before the job takes the run over, and the request of before the retry is forgotten."""
    slurm = FakeSlurm()
    sent = submit(slurm, "train.seed=0..0")
    start(sent.sweep, slurm, 0)
    run = sent.sweep.run_of(sent.sweep.arrays()[0].points()[0])
    write_ended(run, RunState.FAILED, "a bad sample")
    slurm.finish(f"{sent.jobs[0]}_0", exit_code=1)
    (job,) = retry_all(sent.sweep, slurm)
    slurm.start(f"{job}_0")
    again.stop(sent.sweep, list(look(sent.sweep, slurm).values()), slurm)
    retried = sent.sweep.arrays()[-1]
    record = retried.record()
    assert record is not None
    assert element.claim(retried, 0, record.token) == run
    assert stop_request.asked(run) is stop_request.Intent.STOP
