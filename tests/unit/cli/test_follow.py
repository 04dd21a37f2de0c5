"""What a person sees at the end of a run."""

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.process_limits import ChangeLimits
from tests.unit.attempts import attempt
from toolkit import config as configs
from toolkit.base import fsio
from toolkit.base.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, JobFailedError
from toolkit.cli import follow
from toolkit.cli import progress as progress_of_run
from toolkit.files import rundir
from toolkit.files.run_files import RunProgress, RunResult, RunStatus
from toolkit.metrics.goodput import PARTS
from toolkit.run.submission.handle import Run

TIMES = dict.fromkeys(PARTS, 0.0) | {"training": 6.0, "start_up": 1.0}


def ended(**result: Any) -> Run:
    run = rundir.create("my-run")
    (run.tensorboard / "events").touch()
    run.write_result(RunResult.from_json({"attempts": 1, "wall_s": 7.5, "metrics": {}, **result}))
    return Run(run, "local", "1")


Told = Callable[..., str]


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Told:
    """Return a function that follows a run to its end, with this exit code, and returns what is printed."""

    def follow_it(run: Run, code: int, *, bar: bool = False, is_bound: bool = True) -> str:
        assert follow.to_the_end(run, bar=bar, is_bound=is_bound) == code
        return capsys.readouterr().out

    return follow_it


def test_the_end_names_test_accuracy_folder_and_tensorboard(told: Told) -> None:
    run = ended(state="completed", step=450, metrics={"train/loss": 0.1, "eval/accuracy": 0.98333}, goodput=TIMES)
    out = told(run, EXIT_DONE, bar=True)
    assert "test accuracy: 0.9833" in out
    assert "86 % of 7 s was training; 14 % start-up" in out
    assert f"run folder: {run.dir.path}" in out
    assert f"tensorboard {run.id}" in out


def test_a_run_whose_loss_is_no_number_at_its_end_is_told_like_any_other(told: Told) -> None:
    run = ended(state="completed", step=450, metrics={"eval/loss": float("nan"), "eval/accuracy": 0.1})
    out = told(run, EXIT_DONE, bar=True)
    assert "test loss: not a number" in out
    assert "test accuracy: 0.1000" in out


@pytest.mark.parametrize("why", ["rank 0 on node[1-2]: KeyError: '[/x]'", "[red]"])
def test_brackets_in_an_error_are_shown_as_they_stand(told: Told, why: str) -> None:
    out = told(ended(state="failed", why=why, goodput=TIMES), EXIT_FAILED)
    assert why in out
    assert "86 % of 7 s was training; 14 % start-up" in out


def test_a_job_without_a_result_is_one_line(monkeypatch: pytest.MonkeyPatch, told: Told) -> None:
    def gone(self: Run) -> None:
        raise JobFailedError("the job [7] is over")

    monkeypatch.setattr(Run, "wait", gone)
    assert told(ended(state="failed"), EXIT_FAILED) == "the job [7] is over\n"


def test_a_failure_ends_with_the_users_line_and_the_command_that_tells_more(tmp_path: Path, told: Told) -> None:
    script = tmp_path / "train.py"
    script.write_text("def lookup(batch):\n    return batch['labels']\n\n\nlookup({})\n")
    raised = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False).stderr
    followed = ended(state="failed", why="rank 3 on node2: KeyError: 'labels'")
    failure = {"rank": 3, "host": "node2", "how": "KeyError: 'labels'", "where": "train.py:2 in lookup"}
    followed.dir.add_attempt(attempt(1, "crashed", "give_up", first_failure=failure))
    fsio.make_dir(followed.dir.attempt_logs(1), parents=1)
    for rank, text in ((2, "Traceback ...\nRuntimeError: a peer is gone\n"), (3, raised)):
        report = {
            "rank": rank,
            "host": "node2",
            "time": 1.0 + rank,
            "type": "KeyError",
            "message": "",
            "traceback": text,
        }
        fsio.write_json(followed.dir.error_file(1, rank), report)
    *_, place, line, more = told(followed, EXIT_FAILED).splitlines()
    assert place == "  at train.py:2 in lookup, rank 3:"
    assert line == "      return batch['labels']"
    assert f"why {followed.id}` has details" in more


def test_a_failure_without_an_exception_has_no_line_of_code(told: Told) -> None:
    followed = ended(state="failed", why="rank 0 on node1: killed by SIGKILL")
    failure = {"rank": 0, "host": "node1", "how": "killed by SIGKILL"}
    followed.dir.add_attempt(attempt(1, "crashed", "give_up", first_failure=failure))
    *_, advice, more = told(followed, EXIT_FAILED).splitlines()
    assert advice.startswith("  next: ")
    assert more.endswith("has details")


def test_what_is_odd_about_a_completed_run_is_said(told: Told) -> None:
    why = "completed, but the log of rank 0 ends in ValueError: x"
    lines = told(ended(state="completed", why=why, wall_s=1.0), EXIT_DONE).splitlines()
    assert lines[1] == "  but the log of rank 0 ends in ValueError: x"


def test_a_bar_that_cannot_read_a_log_costs_a_line_and_the_run_is_waited_for(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError(116, "Stale file handle", "rank-0.log")

    monkeypatch.setattr("toolkit.cli.progress.follow", fails)
    out = told(ended(state="completed"), EXIT_DONE, bar=True)
    assert "cannot be shown" in out
    assert "completed in" in out


@pytest.mark.parametrize(("executor", "is_bound"), [("slurm", True), ("slurm", False), ("local", False)])
def test_ctrl_c_leaves_a_run_alone_that_does_not_live_in_this_terminal(
    executor: str, is_bound: bool, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(ended(state="completed").dir, executor, "41")
    monkeypatch.setattr(follow, "_watch", interrupted)
    out = told(run, EXIT_STOPPED, bar=True, is_bound=is_bound)
    assert f"`toolkit follow {run.id}` comes back to it, `toolkit stop {run.id}` has it save and end" in out


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


TRAINING: dict[str, Any] = {
    "state": "running",
    "attempt": 1,
    "progress": {
        "phase": "train",
        "step": 225,
        "total_steps": 450,
        "epoch": 10,
        "epochs": 20,
        "loss": 0.0734,
        "samples_per_s": 20626.0,
        "eta_s": 65.0,
        "metrics": {"eval/accuracy": 0.9833},
    },
}


def bar_of(keys: dict[str, Any], width: int, waited_s: float = 5.0) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    progress = progress_of_run._bar(console)
    task = progress.add_task("queued", total=None, figures="", clock="")
    progress_of_run._update(progress, task, RunStatus.from_json(keys), waited_s)
    console.print(progress.get_renderable())
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.count("\n") == 1, text
    return str(text)


@pytest.mark.parametrize(("width", "attempt", "place"), [(80, 1, "epoch 10/20"), (130, 3, "epoch 10/20, attempt 3")])
def test_the_bar_shows_epoch_loss_rate_and_time_left(width: int, attempt: int, place: str) -> None:
    bar = bar_of({**TRAINING, "attempt": attempt}, width)
    for word in (place, "loss 0.0734", "20,626 samples/s", "acc 0.9833", "1:05 left"):
        assert word in bar
    assert "━" in bar


def test_the_bar_of_a_loop_without_epochs_counts_its_steps() -> None:
    steps = {key: value for key, value in TRAINING["progress"].items() if key not in ("epoch", "epochs")}
    assert " step 225/450, attempt 2 " in bar_of({**TRAINING, "attempt": 2, "progress": steps}, 130)
    assert " step 225 " in bar_of({**TRAINING, "progress": {**steps, "total_steps": None}}, 130)
    assert "step" not in bar_of({**TRAINING, "state": "stopping", "progress": steps}, 130)


def test_the_bar_of_a_script_shows_what_it_has_printed_as_a_guess() -> None:
    known = {"state": "running", "attempt": 1, "progress": {}}
    bar = bar_of({**known, "printed": {"epoch": 2, "loss": 0.333}}, 130)
    assert "~epoch 2/?" in bar
    assert "~loss 0.3330" in bar
    bar = bar_of({**known, "printed": {"step": 30, "total_steps": 40, "eta_s": 65.0}}, 130)
    assert "~step 30/40" in bar
    assert "~1:05 left" in bar


def test_a_run_in_the_queue_shows_no_time_left_of_its_last_attempt() -> None:
    bar = bar_of({**TRAINING, "state": "requeued"}, 100, waited_s=4.2)
    assert "requeued" in bar
    assert "0:04 elapsed" in bar
    assert "left" not in bar
    assert "loss" not in bar


def test_while_it_starts_the_bar_says_what_is_waited_for() -> None:
    bar = bar_of({"state": "starting", "world_size": 2, "progress": {}}, 100, waited_s=4.2)
    assert "starting 2 ranks (importing torch" in bar
    assert "0:04 elapsed" in bar


def test_before_there_is_a_status_the_run_is_queued() -> None:
    assert progress_of_run.describe(RunStatus()) == "queued"


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (59.7, "1:00"), (3661.0, "1:01:01")])
def test_times_read_like_a_clock(seconds: float, text: str) -> None:
    assert progress_of_run.time_text(RunProgress(eta_s=seconds), 0.0) == f"{text} left"


LOG = """\
12:34:56 rank 0/2 node1 INFO rank 0 of 2: gloo on cpu
[W1128 12:34:56.123456 socket.cpp:752] [c10d] The hostname of the client socket cannot be retrieved. err=-3
epoch 1 loss 0.5
Traceback (most recent call last):
ValueError: caught, and printed by the loop
12:34:57 rank 0/2 node1 ERROR Connection reset by peer
Traceback (most recent call last):
  File "train.py", line 3, in <module>
RuntimeError: Connection reset by peer
[rank0]: Traceback (most recent call last):
[rank0]: RuntimeError: Connection reset by peer
epoch 1 again
"""
PRINTED = """\
epoch 1 loss 0.5
Traceback (most recent call last):
ValueError: caught, and printed by the loop
epoch 1 again
"""


@pytest.mark.parametrize(("job", "shown"), [("jobs.digits:Digits", PRINTED), (configs.SCRIPT_JOB, LOG)])
@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_what_the_first_rank_prints_is_shown_without_the_lines_that_are_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change_limits: ChangeLimits, job: str, shown: str, piece: int
) -> None:
    monkeypatch.setenv("TOOLKIT_RUNS", str(tmp_path))
    run = rundir.create("own-loop")
    run.config.write_text(f"job: {job}\n" + "argv: [python, x.py]\n" * (job == configs.SCRIPT_JOB))
    lines: list[str] = []
    output = progress_of_run._Output(run)
    fsio.make_dir(run.attempt_logs(1))
    run.rank_log(1, 0).write_text(LOG)
    change_limits(log_read_bytes=piece)
    output.show(lines.append, is_last=True)
    assert "".join(f"{line}\n" for line in lines) == shown
