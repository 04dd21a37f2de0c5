"""Runs from Python: what is submitted, and what a handle tells. Its types are checked by mypy and pyright."""

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, assert_type

import pandas
import pytest

import toolkit
from toolkit.base.errors import RequestError
from toolkit.files import rundir
from toolkit.run.submission import submit
from toolkit.run.submission.handle import Run
from toolkit.run.submission.submit import dry_run

LOGGED = '{"step": 20, "wall_time": 5.0, "loss": 0.5}\n{"step": 40, "wall_time": 6.0, "loss": 0.25, "eval/a": 1.0}\n'


@pytest.fixture
def run() -> Run:
    """A run whose ranks have logged twice in their second attempt."""
    made = Run(rundir.create("digits"), "slurm", "7")
    for attempt in (1, 2):
        made.dir.attempt_logs(attempt).mkdir(parents=True)
        made.dir.rank_log(attempt, 0).write_text(f"attempt {attempt}\nstep 20\nstep 40\n")
    (made.dir.logs / "supervisor.log").write_text("started\n")
    (made.dir.tensorboard / "metrics.jsonl").write_text(LOGGED)
    return made


def test_a_handle_has_logs(run: Run) -> None:
    assert run.logs() == "attempt 2\nstep 20\nstep 40\n"
    assert run.logs(attempt=1, tail=2) == "step 20\nstep 40\n"
    assert run.logs(None) == "started\n"
    with pytest.raises(RequestError, match=r"no log .*attempt-002/rank-3.log"):
        run.logs(3)


def test_metrics_are_a_frame_where_pandas_is_installed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    frame = run.metrics()
    assert isinstance(frame, pandas.DataFrame)
    assert frame.set_index("step")["loss"].to_dict() == {20: 0.5, 40: 0.25}
    assert frame["eval/a"].isna().tolist() == [True, False]
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert run.metrics() == [
        {"step": 20, "time": 5.0, "loss": 0.5},
        {"step": 40, "time": 6.0, "loss": 0.25, "eval/a": 1.0},
    ]


def test_a_line_of_metrics_that_cannot_be_read_is_left_out(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    with (run.dir.tensorboard / "metrics.jsonl").open("a") as file:
        file.write("\0\0\n")
    assert run.metrics()["step"].tolist() == [20, 40]
    assert "cannot be read and is left out" in caplog.text


def test_checkpoints_are_those_that_are_committed(run: Run) -> None:
    assert run.checkpoints() == {}
    for name in ("step-00000100", "step-00000020", "step-00000140.tmp-1"):
        (run.dir.checkpoints / name).mkdir(parents=True)
    assert [*run.checkpoints()] == [20, 100]
    assert run.checkpoints()[100] == run.dir.checkpoints / "step-00000100"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with three files, which Python can import."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "api_main.py").write_text("def main(config): print(config)\ndef helper(config): ...\n")
    (tmp_path / "api_job.py").write_text("import toolkit\nclass Mine(toolkit.Job): ...\n")
    (tmp_path / "base.yaml").write_text("job: api_main.py\noptim: {lr: 0.5, momentum: 0.5}\n")
    return tmp_path


def test_values_are_a_config_and_may_extend_a_file(project: Path) -> None:
    text = dry_run({"extends": "base.yaml", "optim": {"lr": 0.25}}, {"train.epochs": 3}, executor="local")
    assert "lr: 0.25" in text
    assert "momentum: 0.5" in text
    assert "epochs: 3" in text
    assert "name: mine" in dry_run({"job": "api_main.py", "name": "mine"}, executor="local")
    with pytest.raises(toolkit.ConfigError, match=r"optim.lrr: unknown key; did you mean 'optim.lr'"):
        dry_run({"job": "api_main.py", "optim": {"lrr": 1}}, executor="local")
    with pytest.raises(toolkit.ConfigError, match=r"extends: takes the name of one file, not \['base.yaml'\]"):
        dry_run({"extends": ["base.yaml"]}, executor="local")


@pytest.mark.parametrize("what", [None, 3, ["base.yaml"]])
def test_what_is_no_config_is_refused_by_name(project: Path, what: Any) -> None:
    with pytest.raises(RequestError, match=re.escape(f"{what!r} cannot be submitted: give the path of a config")):
        dry_run(what, executor="local")


def test_a_job_is_submitted_by_its_function_or_its_class(project: Path) -> None:
    api_main, api_job = import_module("api_main"), import_module("api_job")
    text = dry_run(api_main.main, ["train.epochs=3"], executor="local")
    assert f"job: {project}/api_main.py" in text
    assert "name: api_main" in text
    assert f"job: {project}/api_job.py" in dry_run(api_job.Mine, executor="local")
    with pytest.raises(RequestError, match=r"helper: .* or a function main\(config\)"):
        dry_run(api_main.helper, executor="local")


@pytest.mark.parametrize("cell", ["def main(config): print(config)", "class Mine: ..."])
def test_a_job_of_a_notebooks_cell_is_refused_with_what_to_do(project: Path, cell: str) -> None:
    code = f"from toolkit import submit\n{cell}\nsubmit({cell.split()[1].partition('(')[0].strip(':')})"
    done = subprocess.run([sys.executable, "-"], input=code, capture_output=True, text=True, check=False)
    assert "%%writefile train.py" in done.stderr.splitlines()[-1]


def typed(run: toolkit.Run) -> None:
    """What a user's own type checker is told of the public names. mypy and pyright read it; it is never called."""
    assert_type(toolkit.submit("a.yaml", {"optim.lr": 0.1}), toolkit.Run)
    assert_type(toolkit.submit({"job": "train.py"}, ["optim.lr=0.1"], after=["gpt"]), toolkit.Run)
    assert_type(toolkit.submit(typed, args=["--epochs", 3]), toolkit.Run)
    assert_type(toolkit.runs(state="completed"), list[toolkit.Run])
    assert_type(toolkit.find("gpt").resume({"train.epochs": 9}), toolkit.Run)
    assert_type(run.wait(timeout_s=3), dict[str, Any])
    assert_type(run.logs(tail=3), str)
    assert_type(run.checkpoints(), dict[int, Path])
    toolkit.submit(3)  # type: ignore[arg-type]
    toolkit.submit("a.yaml", execute="local")  # type: ignore[call-arg]
    toolkit.find("gpt").resum()  # type: ignore[attr-defined]


async def awaited(run: toolkit.Run) -> None:
    assert_type(await run, dict[str, Any])


def test_types_and_signatures_agree() -> None:
    assert toolkit.submit is submit.submit
    assert (Path(toolkit.__file__).parent / "py.typed").is_file()
