"""What a person sees while a run goes on."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from toolkit import config as configs
from toolkit.base import fsio
from toolkit.cli import follow
from toolkit.cli import progress as progress_of_run
from toolkit.files import rundir
from toolkit.files.run_files import RunProgress, RunStatus

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


@pytest.mark.parametrize(("job", "shown"), [("jobs.digits:Digits", PRINTED), (configs.FOREIGN_JOB, LOG)])
@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_what_the_first_rank_prints_is_shown_without_the_lines_that_are_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str, shown: str, piece: int
) -> None:
    monkeypatch.setenv("TOOLKIT_RUNS", str(tmp_path))
    run = rundir.create("own-loop")
    run.config.write_text(f"job: {job}\n" + "argv: [python, x.py]\n" * (job == configs.FOREIGN_JOB))
    lines: list[str] = []
    output = progress_of_run._Output(run)
    fsio.make_dir(run.attempt_logs(1))
    run.rank_log(1, 0).write_text(LOG)
    monkeypatch.setattr(follow, "READ_BYTES", piece)
    output.show(lines.append, is_last=True)
    assert "".join(f"{line}\n" for line in lines) == shown
