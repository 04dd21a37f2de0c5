"""Errors at the command line end in one line and the right exit code."""

import json
import os
import pkgutil
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path

import pytest

from tests.command import Command
from toolkit import registry
from toolkit.base.errors import EXIT_DONE, EXIT_FAILED, SlurmError
from toolkit.cli import commands as cli_commands
from toolkit.cli import main as cli
from toolkit.cli import run_rows
from toolkit.cli.commands import status as status_command
from toolkit.files import rundir
from toolkit.files.run_files import RunResult, RunStatus
from toolkit.slurm import commands
from toolkit.slurm.jobs import JobStatus


def listed(monkeypatch: pytest.MonkeyPatch, job: JobStatus, quiet_s: float = 0.0, **status: str) -> rundir.RunDir:
    """Return a run with a ``status`` that has been silent for so long, and whose job 7 Slurm lists so."""
    run = rundir.create("digits")
    run.config.write_text("")
    keys = {"state": "requeued", "attempt": 2, "job_id": "7", "updated": time.time() - quiet_s, **status}
    run.write_status(RunStatus.from_json(keys))
    monkeypatch.setattr(commands.Slurm, "user_jobs", lambda _: [job])
    return run


@pytest.fixture
def run() -> rundir.RunDir:
    made = rundir.create("digits")
    made.config.write_text("")
    made.write_status(
        RunStatus.from_json({"state": "completed", "attempt": 1, "progress": {"step": 3, "loss": float("nan")}})
    )
    made.write_result(RunResult.from_json({"state": "completed", "metrics": {"eval/accuracy": float("inf")}}))
    return made


def test_status_as_json_is_json_also_when_the_loss_is_no_number(run: rundir.RunDir, command: Command) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    (row,) = json.loads(command("status", "--json"), parse_constant=refuse)
    assert (row["run"], row["loss"], row["metrics"]) == (run.id, None, {"eval/accuracy": None})


@pytest.mark.parametrize(
    ("state", "slurm", "reason", "says", "advice"),
    [
        ("requeued", "PENDING", "Resources", "requeued (PENDING, Resources)", ""),
        ("requeued", "PENDING", "launch failed requeued held", "requeued (", "`scontrol release 7` lets it continue"),
        ("requeued", "PENDING", "BadConstraints", "requeued (", "Slurm holds job 7 (BadConstraints)"),
        ("requeued", "PENDING", None, "requeued (PENDING)", ""),
        # Slurm 24.11 shows REQUEUE_HOLD where 22.05 shows PENDING.
        (
            "starting",
            "REQUEUE_HOLD",
            "launch failed requeued held",
            "starting (REQUEUE_HOLD",
            "Slurm holds job 7 (launch",
        ),
        ("starting", "REQUEUE_HOLD", None, "starting (REQUEUE_HOLD", "Slurm holds job 7 (REQUEUE_HOLD); when that is"),
        ("requeued", "SPECIAL_EXIT", "JobHeldUser", "requeued (SPECIAL_EXIT", "Slurm holds job 7 (JobHeldUser); when"),
        ("requeued", "PENDING", "JobHeldUser", "requeued (", "`scontrol release 7` lets it continue"),
    ],
)
def test_status_says_what_slurm_lets_a_job_wait_for_and_what_lets_it_go_on(
    state: str,
    slurm: str,
    reason: str | None,
    says: str,
    advice: str,
    monkeypatch: pytest.MonkeyPatch,
    command: Command,
) -> None:
    listed(monkeypatch, JobStatus("7", slurm, reason), quiet_s=600, state=state)
    out = command("status")
    assert says in out
    assert advice in out
    assert ("`scontrol release 7`" in out) == bool(advice)


def test_status_says_that_slurm_does_not_answer(monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    def away(self: commands.Slurm) -> list[JobStatus]:
        raise SlurmError("Unable to contact slurm controller (connect failure)")

    listed(monkeypatch, JobStatus("7", "PENDING"), quiet_s=600, state="queued")
    monkeypatch.setattr(commands.Slurm, "user_jobs", away)
    assert "Slurm does not answer: the state of waiting and silent runs" in command.ends(EXIT_DONE, "status").err


@pytest.mark.parametrize(
    ("slurm", "reason", "says"),
    [
        ("PENDING", "JobHeldAdmin", "an administrator holds job 7 (JobHeldAdmin), and can let it continue"),
        ("REVOKED", None, "another cluster of the federation has started job 7"),
        ("DEADLINE", None, "lost (DEADLINE)"),
        ("BOOT_FAIL", None, "lost (BOOT_FAIL)"),
        ("RECONFIG_FAIL", None, "requeued (RECONFIG_FAIL)"),
        ("HIBERNATING", None, "requeued (HIBERNATING)"),
    ],
)
def test_status_shows_every_state_in_which_slurm_may_have_a_requeued_job(
    slurm: str, reason: str | None, says: str, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    run = listed(monkeypatch, JobStatus("7", slurm, reason))
    assert says in command("status", run.id, "--wide")
    assert "scontrol release" not in command("status", run.id)
    assert ("next: an administrator" in command("why", run.id)) == (reason == "JobHeldAdmin")


@pytest.mark.parametrize(("log_s", "is_told"), [(None, True), (100.0, True), (300.0, False)])
def test_a_job_that_fails_without_a_line_in_its_log_does_not_see_the_runs_folder(
    log_s: float | None,
    is_told: bool,
    monkeypatch: pytest.MonkeyPatch,
    command: Command,
) -> None:
    run = listed(monkeypatch, JobStatus("7", "FAILED", "NonZeroExitCode", "node[2-3]", start_time=200.0))
    if log_s is not None:
        log = run.submitit / "7_0_log.out"
        log.write_text("")
        os.utime(log, (log_s, log_s))
    out = command("status", run.id)
    assert "lost (FAILED)" in out
    assert ("job 7 has failed on node2 and has written nothing" in out) == is_told
    assert (f"`toolkit resume {run.id} cluster.exclude=node2` continues without it" in out) == is_told


@pytest.mark.parametrize(
    ("slurm", "quiet_s", "shown"),
    [
        ("FAILED", 20, "lost (FAILED)"),
        ("FAILED", 1, "running"),
        ("COMPLETED", 10, "running"),
        ("COMPLETED", 60, "lost (COMPLETED)"),
        ("RUNNING", 10, "running"),
        ("RUNNING", 60, "running (RUNNING)"),
    ],
)
def test_slurm_is_asked_soon_after_a_supervisor_has_fallen_silent(
    slurm: str, quiet_s: float, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run whose supervisor was killed is shown as lost at once. Before, that took half a minute."""
    run = listed(monkeypatch, JobStatus("7", slurm), quiet_s, state="running")
    assert run_rows.status_rows([run])[0].state == shown


def test_saves_that_fail_are_told_while_the_run_goes_on(command: Command) -> None:
    run = rundir.create("digits")
    run.config.write_text("")
    error = "the last 3 saves failed: the disk is full"
    for found in (error, None):
        fields = {"state": "running", "pid": os.getpid(), "updated": time.time(), "progress": {"save_error": found}}
        run.write_status(RunStatus.from_json(fields))
        assert (error in command("status")) == (found is not None)


@pytest.mark.parametrize("name", ["status.json", "result.json"])
def test_one_damaged_run_does_not_hide_the_others(run: rundir.RunDir, name: str, command: Command) -> None:
    damaged = rundir.create("broken")
    damaged.config.write_text("")
    (damaged.path / name).write_text("{")
    out = command("status", "--wide")
    assert damaged.id in out
    assert run.id in out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["status", "digit"], "did you mean 'digits'?"),
        (["resume", "digits"], "is completed"),
        (["submit", "nowhere.yaml", "--executor", "local"], "nowhere.yaml: no such config file"),
    ],
)
def test_a_wrong_request_is_one_line_and_exit_code_2(
    run: rundir.RunDir, argv: list[str], words: str, command: Command
) -> None:
    (line,) = command.refuses(*argv).splitlines()
    assert words in line


def test_every_module_of_a_command_is_listed_and_has_a_place_in_the_help() -> None:
    modules = {f"toolkit.cli.commands.{module.name}" for module in pkgutil.iter_modules(cli_commands.__path__)}
    assert modules <= {*registry.BUILT_IN["commands"].values()}
    listed = [*chain(*cli.GROUPS.values())]
    assert {*registry.BUILT_IN["commands"]} == {*listed}
    assert len(listed) == len({*listed})
    assert {*cli.FIRST} <= {*listed}


def test_the_command_alone_shows_what_one_needs_first(command: Command) -> None:
    few = command()
    assert len(few.splitlines()) < 24  # a small terminal
    assert "`toolkit --help`" in few
    whole = command("--help")
    assert max(map(len, whole.splitlines())) <= 80
    assert all(f"\n  {name} " in whole for name in cli.commands())


def test_an_unknown_option_is_named_without_the_overrides_around_it(command: Command) -> None:
    err = command.refuses("submit", "c.yaml", "--wat", "optim.lr=1")
    assert err.splitlines()[-1].endswith("unrecognized arguments: --wat; did you mean '--wait'?")


def test_overrides_are_not_required(command: Command) -> None:
    assert command.refuses("submit").splitlines()[-1].endswith("required: CONFIG")


def test_runs_that_cannot_be_made_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TOOLKIT_RUNS", str(tmp_path / "file"))
    config = str(Path(__file__).parents[3] / "configs/digits_ddp.yaml")
    monkeypatch.chdir(Path(__file__).parents[3])
    (line,) = command.refuses("submit", config, "--executor", "local").splitlines()
    assert f"{tmp_path / 'file'} is not a folder" in line
    assert "set TOOLKIT_RUNS" in line


def test_ctrl_c_is_no_traceback(run: rundir.RunDir, monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(status_command, "run", interrupted)
    assert command.ends(130, "status", "digits").err == ""


def run_command(command: str, body: str, stdout: int) -> subprocess.CompletedProcess[str]:
    """Run ``toolkit COMMAND`` in a process of its own. ``body`` is what the command does."""
    code = f"""if True:
        import sys
        from importlib import import_module
        from toolkit.cli import main as cli
        def run(args):
            {body}
        import_module("toolkit.cli.commands.{command}").run = run
        sys.exit(cli.main(sys.argv[1:]))
    """
    argv = [sys.executable, "-c", code, command, "x"]
    return subprocess.run(argv, stdout=stdout, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(("command", "says"), [("run", "Traceback"), ("exec", "toolkit: error: ")])
def test_a_connection_that_breaks_is_no_success(command: str, says: str) -> None:
    done = run_command(command, "raise BrokenPipeError(32, 'Broken pipe')", subprocess.DEVNULL)
    assert done.returncode == EXIT_FAILED
    assert says in done.stderr


def test_a_reader_who_has_seen_enough_is_no_failure() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = run_command("resume", "print('x', flush=True)", writing)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (EXIT_DONE, "")


@pytest.mark.parametrize("words", [[], ["--help"], ["status", "--help"], ["status"]], ids=" ".join)
def test_help_whose_reader_is_gone_is_no_failure(words: list[str], tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    argv, environ = [sys.executable, "-m", "toolkit", *words], {**os.environ, "TOOLKIT_RUNS": str(tmp_path)}
    try:
        done = subprocess.run(argv, stdout=writing, stderr=subprocess.PIPE, text=True, env=environ)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (EXIT_DONE, "")
