"""What a person sees at the end of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from toolkit.base.errors import EXIT_DONE, EXIT_FAILED, JobFailedError
from toolkit.cli import follow
from toolkit.files import rundir
from toolkit.files.run_files import RunResult
from toolkit.metrics.goodput import PARTS
from toolkit.run.submission.handle import Run

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
