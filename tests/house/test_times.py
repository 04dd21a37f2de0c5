"""Where the time went, in all that shows it."""

import json
from pathlib import Path

import pytest

from tests.command import Command
from tests.unit.run.test_goodput import HOUR, SUBMITTED
from toolkit import config as configs
from toolkit.base import fsio
from toolkit.base.errors import EXIT_DONE
from toolkit.cli import main as cli
from toolkit.config import JobConfig
from toolkit.files import rundir
from toolkit.files.run_files import AttemptRecord, RunResult, RunState, RunStatus
from toolkit.files.rundir import RunDir
from toolkit.metrics import start_up
from toolkit.metrics.goodput import of_files, sentence


def test_why_and_the_report_show_the_first_and_the_last_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.setenv("TOOLKIT_RUNS", str(tmp_path))
    run = rundir.create("test", tmp_path)
    fsio.write_atomic(run.config, configs.dump_config(JobConfig()))
    for number, parts in enumerate(
        ({"queue": 3.0, "agents": 0.5, "first_step": 0.25}, {}, {"ranks": 0.1, "group": 0.2, "first_step": 0.02}), 1
    ):
        run.add_attempt(AttemptRecord(number, ("node1",), 1.7e9, 1.7e9 + 9, "crashed", "restart", start_up=parts))
    run.write_result(RunResult(RunState.COMPLETED, 3))
    out = " ".join(command("why", run.id, "--all").split())
    assert "start of attempt 1: 3.8 s to the end of the first step: 3.0 s in the queue, 0.5 s agent" in out
    assert "start of attempt 3: 0.3 s to the end of the first step: 0.1 s store and ranks' processes, 0.2 s" in out
    assert json.loads(command("why", run.id, "--json"))["start_up"]["3"]["group"] == 0.2
    page = tmp_path / "page.html"
    command("report", run.id, "--to", str(page))
    text = page.read_text()
    assert "Where the start went" in text
    assert start_up.WORDS["group"] in text


def test_status_and_why_tell_where_the_time_went_while_it_runs_and_after(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = {**HOUR, "ratio": 0.87}
    live = {"attempt": 1, "goodput": ledger, "submitted": SUBMITTED, "updated": SUBMITTED + 4320.0, "started": 0.0}
    run.write_status(RunStatus.from_json({"state": "running", "progress": {}, **live}))
    assert of_files(run) == pytest.approx(ledger, abs=1e-3)
    for command in (["status"], ["why", "--all"]):
        assert cli.main([*command, str(run.path)]) == EXIT_DONE
        assert sentence(HOUR) in capsys.readouterr().out
    run.write_result(
        RunResult.from_json(
            {"state": "completed", "attempts": 1, "metrics": {}, "goodput": {**ledger, "training": 3759.0}}
        )
    )
    assert cli.main(["status", str(run.path), "--json"]) == EXIT_DONE
    assert json.loads(capsys.readouterr().out)[0]["goodput"]["training"] == 3759.0
