"""What a person sees while a run goes on."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from toolkit.files.run_files import RunProgress, RunStatus
from toolkit.plugins.logs import progress as progress_of_run

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


@pytest.mark.parametrize("width", [80, 130])
def test_the_bar_shows_epoch_loss_rate_and_time_left(width: int) -> None:
    bar = bar_of(TRAINING, width)
    for word in ("epoch 10/20", "loss 0.0734", "20,626 samples/s", "acc 0.9833", "1:05 left"):
        assert word in bar
    assert "━" in bar


def test_the_bar_of_a_loop_without_epochs_counts_its_steps() -> None:
    steps = {key: value for key, value in TRAINING["progress"].items() if key not in ("epoch", "epochs")}
    assert " step 225/450, attempt 2 " in bar_of({**TRAINING, "attempt": 2, "progress": steps}, 130)
    assert " step 225 " in bar_of({**TRAINING, "progress": {**steps, "total_steps": None}}, 130)
    assert "step" not in bar_of({**TRAINING, "state": "stopping", "progress": steps}, 130)


def test_a_restarted_attempt_is_counted_in_the_bar() -> None:
    assert "epoch 10/20, attempt 3" in bar_of({**TRAINING, "attempt": 3}, 130)


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
    assert progress_of_run.clock(RunProgress(eta_s=seconds), 0.0) == f"{text} left"
