"""What a person sees while a run goes on, and at its end."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from toolkit.base.errors import EXIT_DONE, EXIT_FAILED, JobFailedError
from toolkit.cli import follow
from toolkit.files import rundir
from toolkit.files.run_files import RunProgress, RunResult, RunStatus
from toolkit.metrics.goodput import PARTS
from toolkit.run.submission.handle import Run

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
    progress = follow._bar(console)
    task = progress.add_task("queued", total=None, figures="", clock="")
    follow._update(progress, task, RunStatus.from_json(keys), waited_s)
    console.print(progress.get_renderable())
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.count("\n") == 1, text
    return str(text)


@pytest.mark.parametrize("width", [80, 130])
def test_the_bar_shows_epoch_loss_rate_and_time_left(width: int) -> None:
    bar = bar_of(TRAINING, width)
    for word in ("epoch 10/20", "loss 0.0734", "20,626 samples/s", "acc 0.9833", "1:05 left"):
        assert word in bar
    assert "━" in bar


def test_a_restarted_attempt_is_counted_in_the_bar() -> None:
    assert "epoch 10/20, attempt 3" in bar_of({**TRAINING, "attempt": 3}, 130)


def test_while_it_starts_the_bar_says_what_is_waited_for() -> None:
    bar = bar_of({"state": "starting", "world_size": 2, "progress": {}}, 100, waited_s=4.2)
    assert "starting 2 ranks (importing torch" in bar
    assert "0:04 elapsed" in bar


def test_before_there_is_a_status_the_run_is_queued() -> None:
    assert follow.describe(RunStatus()) == "queued"


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (59.7, "1:00"), (3661.0, "1:01:01")])
def test_times_read_like_a_clock(seconds: float, text: str) -> None:
    assert follow.clock(RunProgress(eta_s=seconds), 0.0) == f"{text} left"


TIMES = dict.fromkeys(PARTS, 0.0) | {"training": 6.0, "start_up": 1.0}


def ended(tmp_path: Path, **result: Any) -> Run:
    run = rundir.create("my-run", tmp_path)
    (run.tensorboard / "events").touch()
    run.write_result(RunResult.from_json({"attempts": 1, "wall_s": 7.5, "metrics": {}, **result}))
    return Run(run, "local", "1")


def test_the_end_names_test_accuracy_folder_and_tensorboard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ended(
        tmp_path, state="completed", step=450, metrics={"train/loss": 0.1, "eval/accuracy": 0.98333}, goodput=TIMES
    )
    assert follow.to_the_end(run, bar=True) == EXIT_DONE
    out = capsys.readouterr().out
    assert "test accuracy: 0.9833" in out
    assert "86 % of 7 s was training; 14 % start-up" in out
    assert f"run folder: {run.dir.path}" in out
    assert f"tensorboard {run.id}" in out


def test_a_run_whose_loss_is_no_number_at_its_end_is_told_like_any_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ended(tmp_path, state="completed", step=450, metrics={"eval/loss": float("nan"), "eval/accuracy": 0.1})
    assert follow.to_the_end(run, bar=True) == EXIT_DONE
    out = capsys.readouterr().out
    assert "test loss: not a number" in out
    assert "test accuracy: 0.1000" in out


@pytest.mark.parametrize("why", ["rank 0 on node[1-2]: KeyError: '[/x]'", "[red]"])
def test_brackets_in_an_error_are_shown_as_they_stand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], why: str
) -> None:
    assert follow.to_the_end(ended(tmp_path, state="failed", why=why, goodput=TIMES), bar=False) == EXIT_FAILED
    out = capsys.readouterr().out
    assert why in out
    assert "86 % of 7 s was training; 14 % start-up" in out


def test_a_job_without_a_result_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def gone(self: Run) -> None:
        raise JobFailedError("the job [7] is over")

    monkeypatch.setattr(Run, "wait", gone)
    assert follow.to_the_end(ended(tmp_path, state="failed"), bar=False) == EXIT_FAILED
    assert capsys.readouterr().out == "the job [7] is over\n"
