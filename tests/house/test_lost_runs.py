"""Runs whose job is over and wrote no result, in all that shows them."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.command import Command
from tests.unit.cli.test_cli import listed, run  # noqa: F401
from tests.unit.run.test_local_processes import UNSEEN, make_run, owned_by, spellings
from toolkit.base.errors import EXIT_DONE, EXIT_REQUEST, RequestError
from toolkit.cli import disk
from toolkit.cli import main as cli
from toolkit.cli.main import main
from toolkit.files import rundir
from toolkit.files.run_files import AttemptRecord, RunResult
from toolkit.files.rundir import RunDir
from toolkit.run.records import user_requests
from toolkit.run.records.ownership import Claim
from toolkit.run.records.user_requests import Intent
from toolkit.run.submission.handle import attach
from toolkit.run.submission.resume_run import resume
from toolkit.slurm.jobs import JobStatus


@pytest.mark.parametrize("command", ["status", "why"])
def test_a_job_that_slurm_could_not_start_says_on_which_node_and_what_to_do(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = listed(monkeypatch, JobStatus("7", "FAILED", "JobLaunchFailure", "node[2-3]"))
    assert cli.main([command, run.id]) == EXIT_DONE
    out = capsys.readouterr().out
    assert "lost (FAILED)" in out
    assert "Slurm could not start job 7 on node2" in out
    assert f"`toolkit resume {run.id} cluster.exclude=node2` continues without it" in out


@pytest.mark.parametrize(("wish", "state"), [(Intent.STOP, "stopped"), (Intent.CANCEL, "cancelled")])
def test_a_run_ended_before_its_supervisor_could_record_it_says_what_to_do(
    wish: Intent, state: str, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    """The job was cancelled at the moment at which it started."""
    run = listed(monkeypatch, JobStatus("7", "CANCELLED"), state="queued")
    user_requests.record_intent(run, wish)
    out = command("why", run.id)
    assert f"digits/{run.id}: {state}\n  job 7 is over (CANCELLED) and wrote no result" in out
    assert f"next: `toolkit resume {run.id}` starts over, as there is no checkpoint" in out


def test_a_run_whose_checkpoints_are_gone_is_not_said_to_start_over(command: Command) -> None:
    run = rundir.create("digits")
    run.config.write_text("")
    run.add_attempt(AttemptRecord(1, ("node1",), 1.0, 2.0, "stopped", "finish", step_saved=40))
    run.write_result(RunResult.from_json({"state": "stopped"}))
    assert f"next: `toolkit resume {run.id}` continues once the checkpoint of step 40 is back" in command("why", run.id)


@pytest.mark.parametrize("process", UNSEEN)
def test_a_person_ends_a_run_whose_process_cannot_be_seen(
    tmp_path: Path, process: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every command says the same, and what it says works."""
    monkeypatch.setenv("TOOLKIT_RUNS", str(tmp_path))
    run = make_run(tmp_path, state="running", updated=time.time())
    before = owned_by(run, os.getpid(), **process)
    advice = f"toolkit cancel {run.id} --gone"
    for words in (["resume"], ["stop"], ["cancel"], ["rm"]):
        assert main([*words, run.id]) == EXIT_REQUEST
        assert f"`{advice}`" in capsys.readouterr().err
    assert user_requests.read_intent(run) is None  # the refused requests have left nothing
    # One that writes is waited for, and one that has been silent is not.
    with pytest.raises(TimeoutError):
        attach(run).wait(0.0)
    run.write_status(run.status().replace(updated=time.time() - 600))
    with pytest.raises(RequestError, match=f"`{advice}`.*is not waited for"):
        attach(run).wait()
    assert main(advice.split()[1:]) == 0
    assert run.result().state == "cancelled"
    assert not Claim(run, before).holds()  # it ends if it lives after all
    assert main(["rm", run.id]) == 0


def test_a_run_under_another_spelling_of_its_path_is_the_same_run(tmp_path: Path) -> None:
    """Its supervisor is known by its start, and not by what its command line says."""
    run = make_run(tmp_path / "runs", state="running")
    (tmp_path / "runs/x").mkdir()
    for path in spellings(run.path):
        found = rundir.find(str(path))
        with subprocess.Popen(["sleep", "60"]) as process:
            owned_by(run, process.pid)
            assert not attach(found).is_over()
            with pytest.raises(RequestError, match="when it has ended"):
                resume(found)
            with pytest.raises(RequestError, match="when it has ended"):
                disk.refuse(RunDir(path), {})
            attach(found).stop()
            assert process.wait(10) == -signal.SIGTERM
        assert attach(found).is_over()
        run.clear_result()  # which the command has written where the process ended at once
