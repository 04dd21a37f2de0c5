"""The user's command at a run's end. Its input, and that no failure of it harms the run. Processes are real."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from tests.process_limits import ChangeLimits
from tests.unit.run.test_supervisor import Ranks, completes, ended, quick, supervise  # noqa: F401
from tests.waiting import processes_with, wait_for
from toolkit import config as configs
from toolkit.base import fsio
from toolkit.base.logs import LOGGER
from toolkit.config import JobConfig
from toolkit.files import rundir
from toolkit.files.run_files import RunResult
from toolkit.files.rundir import RunDir
from toolkit.nodes.allocation import Allocation
from toolkit.run.attempt.facts import Verdict
from toolkit.run.records import stop_request
from toolkit.run.records.stop_request import Intent
from toolkit.run.supervise import entry, notify
from toolkit.run.supervise.supervisor import Supervisor

#: Notes its environment and what it reads, a line of each for each call.
TELL = ["sh", "-c", 'env -0 | tr "\\0\\n" "\\n " > "$0.env"; tr -d "\\n" >> "$0.said"; echo >> "$0.said"']


@pytest.fixture
def heard(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(LOGGER, "propagate", True)
    caplog.set_level(logging.INFO, "toolkit")
    return caplog


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Return a run that tells its end to files beside the runs."""
    run = rundir.create("digits", tmp_path / "runs")
    told_by(run, *TELL, str(tmp_path / "note"))
    return run


def told_by(run: RunDir, *command: str) -> None:
    fsio.write_atomic(run.config, configs.dump_config(JobConfig(notify=list(command))))


def said(tmp_path: Path) -> list[dict[str, Any]]:
    """Return what each call of the command has read from its standard input."""
    path = tmp_path / "note.said"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_the_command_is_told_run_state_and_reason_and_reads_the_result(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = {"state": "failed", "why": "rank 3 on node2: exit code 1", "metrics": {"eval/accuracy": 0.9}}
    run.write_result(RunResult.from_json(result))
    job = {"SLURM_JOB_ID": "7", "SLURM_CPU_BIND": "mask", "RANK": "0", "PYTHONPATH": f"{run.code}:/lib/mine"}
    for name, value in {**job, "PYTHONSAFEPATH": "1", "SLURM_CONF": "/etc/s.conf", "TOOLKIT_RUN_DIR": "/r"}.items():
        monkeypatch.setenv(name, value)
    for name in [name for name in os.environ if name.startswith("TOOLKIT_") and name != "TOOLKIT_RUN_DIR"]:
        monkeypatch.delenv(name)  # of the user who runs the tests
    notify.notify(run)
    assert said(tmp_path) == [RunResult.from_json(result).to_json()]
    environ = dict(line.split("=", 1) for line in (tmp_path / "note.env").read_text().splitlines() if "=" in line)
    told = {name: value for name, value in environ.items() if name.startswith("TOOLKIT_")}
    assert told == {
        "TOOLKIT_RUNS": str(tmp_path / "runs"),
        "TOOLKIT_NAME": "digits",
        "TOOLKIT_RUN": run.id,
        "TOOLKIT_FOLDER": str(run.path),
        "TOOLKIT_STATE": "failed",
        "TOOLKIT_WHY": "rank 3 on node2: exit code 1",
    }
    assert {name for name in environ if name.startswith(("SLURM", "RANK"))} == {"SLURM_CONF"}  # it may sbatch
    assert environ["PYTHONPATH"] == "/lib/mine"


def test_a_word_with_blanks_dollars_and_quotes_arrives_as_it_is(run: RunDir, tmp_path: Path) -> None:
    words = ["a b", "$HOME", "it's; rm -rf /", ""]
    told_by(run, "sh", "-c", 'printf "%s\\n" "$@"', "sh", *words)
    run.write_result(RunResult.from_json({"state": "completed"}))
    notify.notify(run)
    assert (run.logs / "notify.log").read_text().splitlines() == words


@pytest.mark.parametrize(
    ("command", "words", "output"),
    [
        (["sh", "-c", "echo no route >&2; exit 3", "https://hook/secret"], "sh failed with exit code 3", "no route\n"),
        (["no-such-program"], "no-such-program failed with exit code 1", "no-such-program: cannot be started: No such"),
    ],
    ids=["fails", "is not there"],
)
def test_its_failure_is_one_line_without_its_arguments(
    run: RunDir, heard: pytest.LogCaptureFixture, command: list[str], words: str, output: str
) -> None:
    told_by(run, *command)
    run.write_result(RunResult.from_json({"state": "completed"}))
    notify.notify(run)
    (record,) = heard.records
    assert words in record.getMessage()
    assert "secret" not in record.getMessage()
    assert (run.logs / "notify.log").read_text().startswith(output)
    assert (run.logs / "notify.log").stat().st_mode & 0o077 == 0


def test_one_that_does_not_end_is_killed_with_what_it_started(
    run: RunDir, heard: pytest.LogCaptureFixture, change_limits: ChangeLimits
) -> None:
    change_limits(notice_s=0.5)
    told_by(run, "sh", "-c", "sleep 300 & sleep 300")
    run.write_result(RunResult.from_json({"state": "completed"}))
    notify.notify(run)
    assert "sh was not done after 0.5 s and is killed" in heard.text
    wait_for(lambda: not processes_with(f"TOOLKIT_FOLDER={run.path}"), 10, "the end of what it started")


def test_a_config_that_cannot_be_read_is_one_line_too(run: RunDir, heard: pytest.LogCaptureFixture) -> None:
    run.config.write_text("notfy: [x]\n")
    run.write_result(RunResult.from_json({"state": "completed"}))
    notify.notify(run)
    (record,) = heard.records
    assert "unknown key 'notfy'" in record.getMessage()


def test_without_a_command_nothing_is_called_or_said(run: RunDir, heard: pytest.LogCaptureFixture) -> None:
    told_by(run)
    run.write_result(RunResult.from_json({"state": "completed"}))
    notify.notify(run)
    assert heard.records == []
    assert not (run.logs / "notify.log").exists()


# -------------------------------------------------------------------------------------------------- when it is called


def test_it_is_called_once_at_the_end_of_all_attempts(run: RunDir, tmp_path: Path) -> None:
    seen: list[int] = []

    def crashes(ranks: Ranks) -> None:
        seen.append(len(said(tmp_path)))
        ranks.events.put(ended(1))

    assert supervise(run, Ranks(crashes, completes)) == 0
    assert seen == [0]
    assert [told["state"] for told in said(tmp_path)] == ["completed"]


def test_it_is_called_when_the_run_is_given_up(run: RunDir, tmp_path: Path) -> None:
    assert supervise(run, Ranks(lambda ranks: ranks.events.put(ended(1))), max_failures=0) == 1
    (told,) = said(tmp_path)
    assert (told["state"], told) == ("failed", run.result().to_json())


@pytest.mark.parametrize(("wanted", "state"), [(Intent.STOP, "stopped"), (Intent.CANCEL, "cancelled")])
def test_it_is_called_when_the_run_ends_before_it_starts_again(
    run: RunDir, tmp_path: Path, wanted: Intent, state: str
) -> None:
    stop_request.ask(run, wanted)
    supervise(run, Ranks())
    assert [told["state"] for told in said(tmp_path)] == [state]


def test_it_is_called_when_the_supervisor_itself_fails(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Supervisor, earlier_death: str | None) -> int:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Supervisor, "run", fails)
    monkeypatch.setattr(os, "umask", lambda mask: mask)
    with pytest.raises(SystemExit):
        entry.supervise(str(run.path), "local")
    assert [told["why"] for told in said(tmp_path)] == ["the supervisor failed: RuntimeError: a bug"]


def test_a_run_that_goes_on_tells_nobody(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that Slurm takes back has no result. A run that Slurm starts after its end has told it already."""
    monkeypatch.setattr(Supervisor, "_run_attempts", lambda self: Verdict("preempted", "requeue", ""))  # type: ignore[arg-type]
    Supervisor(run, JobConfig(), Allocation(("here",), (4,), 1), Ranks(), None).run()
    run.write_result(RunResult.from_json({"state": "completed"}))
    Supervisor(run, JobConfig(), Allocation(("here",), (4,), 1, restart_count=1), Ranks(), None).run()
    assert said(tmp_path) == []


def test_a_command_of_several_lines_is_taken() -> None:
    configs.validate(configs.load_config(None, ['notify=[sh, -c, "echo done\\nmail me"]']))
