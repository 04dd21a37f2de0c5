"""``trackers:`` in a config, and the programs that carry it out. The whole of it: tests/dist/test_sync.py."""

import signal
import sys
from pathlib import Path

import pytest

from tests.process_limits import ChangeLimits
from tests.waiting import wait_for
from toolkit.base.errors import ConfigError
from toolkit.config import JobConfig, check_places
from toolkit.files import rundir
from toolkit.files.run_files import RunResult
from toolkit.files.rundir import RunDir
from toolkit.plugins import trackers
from toolkit.plugins.trackers import Senders


@pytest.fixture
def run() -> RunDir:
    run = rundir.create("gpt")
    run.config.write_text("job: jobs.classify\n")
    return run


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change_limits: ChangeLimits) -> Path:
    """Stand in for Python: note the words of each start, and end with the code in a file, or wait for one."""
    program, codes = tmp_path / "python", tmp_path / "codes"
    program.write_text(
        f"""#!/bin/sh
        case "$1" in -m) ;; *) exec {sys.executable} "$@" ;; esac
        echo "$@" >> {tmp_path}/starts
        while ! test -s {codes}; do sleep 0.02; done
        exit $(cat {codes})
        """
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    change_limits(upload_pause_s=0.01)
    return tmp_path


def answer(folder: Path, code: str) -> None:
    """Have the programs end with ``code``. They read the file at any moment."""
    (folder / "new").write_text(code)
    (folder / "new").replace(folder / "codes")


def starts(folder: Path) -> list[str]:
    path = folder / "starts"
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ("mlfow", "trackers: unknown value 'mlfow'; did you mean 'mlflow'? valid: mlflow, wandb"),
        ("wandb:mine", "trackers: wandb is not installed here: pip install wandb"),
    ],
)
def test_what_cannot_be_sent_to_is_refused_before_the_queue(
    entry: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda _: None)
    with pytest.raises(ConfigError) as refused:
        check_places(JobConfig(trackers=[entry]))
    assert str(refused.value) == why


def test_wandb_that_is_told_not_to_send_is_refused_before_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda _: True)
    for mode in ("online", "shared"):
        monkeypatch.setenv("WANDB_MODE", mode)
        check_places(JobConfig(trackers=["wandb"]))
    for mode in ("offline", "disabled", "dryrun"):
        monkeypatch.setenv("WANDB_MODE", mode)
        with pytest.raises(
            ConfigError, match=f"WANDB_MODE={mode} is set: unset it, or take wandb out and send them later"
        ):
            check_places(JobConfig(trackers=["wandb"]))


def test_each_tracker_has_a_program_that_ends_with_a_run_that_goes_on_elsewhere(run: RunDir, python: Path) -> None:
    senders = Senders(run, JobConfig(trackers=["mlflow", "wandb:lab"]))
    wait_for(lambda: len(starts(python)) == 2, 10, "two programs")
    assert sorted(starts(python)) == [
        f"-m toolkit upload {run.path} mlflow --follow",
        f"-m toolkit upload {run.path} wandb --project lab --follow",
    ]
    processes = [program._process for program in senders._programs]
    senders.close()  # without a result: it is requeued
    assert [process.poll() for process in processes] == [-signal.SIGKILL] * 2


def test_one_that_fails_is_started_again_and_one_that_is_refused_is_not(
    run: RunDir, python: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answer(python, "1")
    senders = Senders(run, JobConfig(trackers=["mlflow"]))
    wait_for(lambda: len(starts(python)) >= 3, 10, "more starts")
    answer(python, "2")
    wait_for(lambda: not senders._programs[0]._thread.is_alive(), 10, "its end")
    assert [record.message.split(";")[0] for record in caplog.records] == [
        "trackers: mlflow ended with 1",
        "trackers: mlflow ended with 2",
    ]
    senders.close()


@pytest.mark.parametrize("code", ["", "1"], ids=["it sends", "it is away, and nothing runs between two tries"])
def test_at_the_end_of_a_run_the_last_points_are_waited_for_but_not_for_long(
    code: str, run: RunDir, python: Path, change_limits: ChangeLimits, caplog: pytest.LogCaptureFixture
) -> None:
    run.write_result(RunResult.from_json({"state": "completed"}))
    senders = Senders(run, JobConfig(trackers=["mlflow"]))
    wait_for(lambda: starts(python), 10, "its start")
    answer(python, "0")
    senders.close()
    assert not caplog.records
    answer(python, code)
    change_limits(last_points_s=0.2, last_upload_pause_s=60.0)
    senders = Senders(run, JobConfig(trackers=["mlflow:our lab"]))
    if code:
        wait_for(lambda: caplog.records, 10, "its first end")
    senders.close()
    advice = f"`toolkit upload {run.id} mlflow --project 'our lab'` sends the rest"
    assert caplog.records[-1].message == f"trackers: mlflow has not received everything within 0.2 s: {advice}"
