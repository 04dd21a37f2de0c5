"""How the points of a sweep stand, and what retry and stop do about them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.sweep.test_submission import project, submit  # noqa: F401  # a fixture
from toolkit.cli import main as cli
from toolkit.cli import show
from toolkit.launch.record import ownership
from toolkit.launch.record.journal import write_ended
from toolkit.run_files import RunProgress, RunResult, RunState
from toolkit.slurm.fake import FakeSlurm
from toolkit.slurm.shared_queue import SharedQueue
from toolkit.sweep import again, element
from toolkit.sweep.folder import SweepDir
from toolkit.sweep.states import PointStanding, standings


def look(sweep: SweepDir, slurm: FakeSlurm, damage: list[str] | None = None) -> dict[int, PointStanding]:
    queue = SharedQueue(slurm, None)
    found = standings(sweep, queue.show_jobs, show.status_rows, [] if damage is None else damage)
    return {each.point.values["train.seed"]: each for each in found}


def start(sweep: SweepDir, slurm: FakeSlurm, index: int) -> None:
    """What an element does when Slurm starts it, up to its first status."""
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
    start(sent.sweep, slurm, 0)
    assert again.stop(sent.sweep, list(look(sent.sweep, slurm).values()), slurm) == (4, 1)
    job = sent.jobs[0]
    assert [(call.job_id, call.signal, call.batch) for call in slurm.sent] == [(f"{job}_0", "USR1", True)]
    states = [slurm.show_jobs([f"{job}_{index}"])[f"{job}_{index}"] for index in range(5)]
    assert [status and status.state for status in states] == ["RUNNING", *["CANCELLED"] * 4]
    run = sent.sweep.run_of(sent.sweep.arrays()[0].points()[0])
    assert (run.path / "intent.json").exists()


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


def test_a_damaged_run_is_a_row_like_others(capsys: pytest.CaptureFixture[str]) -> None:
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
