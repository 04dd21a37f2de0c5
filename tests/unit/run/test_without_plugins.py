"""What the core refuses, or does without, where the plugins `after` and `sweep` are missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.run.test_supervisor import Ranks, quick  # noqa: F401  # a fixture
from toolkit import config as configs
from toolkit.base import fsio
from toolkit.base.errors import EXIT_DONE, EXIT_REQUEST, ConfigError
from toolkit.cli import main as cli
from toolkit.config import JobConfig
from toolkit.files import rundir
from toolkit.files.run_files import AfterRecord, RunState
from toolkit.files.rundir import RunDir
from toolkit.nodes.allocation import Allocation
from toolkit.run.attempt.journal import write_ended
from toolkit.run.submission.handle import withdraw_retry
from toolkit.run.submission.resume import resume
from toolkit.run.submission.submit import submit
from toolkit.run.supervise.supervisor import Supervisor


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("TOOLKIT_RUNS", str(tmp_path / "runs"))
    made = rundir.create("gpt")
    fsio.write_atomic(made.config, configs.dump_config(JobConfig(name="gpt")))
    return made


def test_a_run_that_is_to_wait_is_refused(run: RunDir, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("name: mine\n")
    with pytest.raises(ConfigError, match=r"--after needs a plugin that is not installed: .* hook 'after'"):
        submit(tmp_path / "mine.yaml", executor="local", after=run.id)
    assert rundir.all_runs() == [run]


def test_a_run_that_waits_neither_starts_nor_is_resumed_and_is_listed(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    fsio.write_json(run.after_path, AfterRecord(("/runs/first/1",), ()).to_file())
    with pytest.raises(ConfigError, match=r"after\.json needs a plugin that is not installed"):
        Supervisor(run, JobConfig(), Allocation(("here",), (1,), 1), Ranks(), None).run()
    assert cli.main(["status", run.id, "--json"]) == EXIT_DONE
    assert json.loads(capsys.readouterr().out)[0]["after"] == ["run first/1"]
    write_ended(run, RunState.STOPPED, "stopped")
    with pytest.raises(ConfigError, match=r"after\.json needs a plugin that is not installed"):
        resume(run, executor="local")


def test_the_name_of_a_sweep_is_refused_and_its_runs_are_found(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = rundir.runs_root() / rundir.SWEEPS / "gpt"
    sweep.mkdir(parents=True)
    (sweep / "sweep.json").write_text("{}")
    fsio.write_json(run.path / "point.json", {"version": 1, "sweep": "gpt", "id": "p1"})
    assert cli.main(["status", "gpt"]) == EXIT_REQUEST
    assert "the sweep 'gpt' needs a plugin that is not installed" in capsys.readouterr().err
    assert rundir.find(run.id) == run
    assert cli.main(["status"]) == EXIT_DONE
    write_ended(run, RunState.FAILED, "failed")
    assert not withdraw_retry(run)
