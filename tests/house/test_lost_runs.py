"""Runs whose job is over and wrote no result, in all that shows them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.unit.cli.test_cli import run  # noqa: F401
from toolkit.base.errors import EXIT_DONE
from toolkit.cli import main as cli
from toolkit.files import rundir
from toolkit.files.run_files import RunStatus
from toolkit.run.records import stop_request
from toolkit.run.records.stop_request import Intent
from toolkit.slurm import commands
from toolkit.slurm.jobs import JobStatus


@pytest.mark.parametrize("command", ["status", "why"])
def test_a_job_that_slurm_could_not_start_says_on_which_node_and_what_to_do(
    command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOOLKIT_RUNS", str(tmp_path / "runs"))
    run = rundir.create("digits")
    run.config.write_text("")
    run.write_status(RunStatus.from_json({"state": "requeued", "attempt": 2, "job_id": "7", "updated": time.time()}))
    failed = JobStatus("7", "FAILED", "JobLaunchFailure", "node[2-3]")
    monkeypatch.setattr(commands.Slurm, "user_jobs", lambda _: [failed])
    assert cli.main([command, run.id]) == EXIT_DONE
    out = capsys.readouterr().out
    assert "lost (FAILED)" in out
    assert "Slurm could not start job 7 on node2" in out
    assert f"`toolkit resume {run.id} cluster.exclude=node2` goes on without it" in out


@pytest.mark.parametrize(("wish", "state"), [(Intent.STOP, "stopped"), (Intent.CANCEL, "cancelled")])
def test_a_run_ended_before_its_supervisor_could_record_it_says_what_to_do(
    wish: Intent, state: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job was cancelled at the moment at which it started."""
    monkeypatch.setenv("TOOLKIT_RUNS", str(tmp_path / "runs"))
    run = rundir.create("digits")
    run.config.write_text("")
    run.write_status(RunStatus.from_json({"state": "queued", "job_id": "7", "updated": time.time()}))
    stop_request.ask(run, wish)
    monkeypatch.setattr(commands.Slurm, "user_jobs", lambda _: [JobStatus("7", "CANCELLED", None)])
    assert cli.main(["why", run.id]) == EXIT_DONE
    out = capsys.readouterr().out
    assert f"digits/{run.id}: {state}\n  job 7 is over (CANCELLED) and wrote no result" in out
    assert f"next: `toolkit resume {run.id}` begins anew: there is no checkpoint" in out
