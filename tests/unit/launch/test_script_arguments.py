"""The arguments of a user's script, from the command line to ``sys.argv``: submit, sweep, resume, and a rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit import config as configs
from toolkit import rundir
from toolkit.cli import main as cli
from toolkit.cli.show import given_words
from toolkit.errors import EXIT_DONE, EXIT_REQUEST
from toolkit.launch.record.sweep_folder import SweepDir
from toolkit.launch.start import foreign
from toolkit.launch.submission import executors, submit
from toolkit.launch.submission.handle import Run
from toolkit.run_files import RunResult
from toolkit.rundir import RunDir
from toolkit.slurm.fake import FakeSlurm
from toolkit.sweep import element, request, submission
from toolkit.sweep.request import Options

#: A loop by its text, which a rank of this test ends before it would import torch.
LOOP = """
import json, sys
json.dump(sys.argv[1:], open("argv.json", "w"))
sys.exit(0)
import toolkit
with toolkit.start() as run:
    pass
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.setenv("TOOLKIT_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("TOOLKIT_SITE", str(tmp_path / "site.yaml"))
    (tmp_path / "site.yaml").write_text("{}")
    Path("loop.py").write_text(LOOP)
    Path("plain.py").write_text("print(1)\n")
    monkeypatch.setattr(executors, "send", lambda run, config, executor, owner, **_: Run(run, executor, "1"))
    return tmp_path / "project"


def toolkit(*argv: str) -> RunDir:
    """Return the run that a command has made, or else the first one."""
    before = rundir.all_runs()
    assert cli.main([*argv]) == EXIT_DONE
    return next((run for run in rundir.all_runs() if run not in before), *before[:1])


def words_of(run: RunDir) -> list[str]:
    return configs.command_line(configs.load_config(run.config, site=False))


def test_the_words_after_the_dashes_are_those_of_the_script() -> None:
    run = toolkit(
        "submit", "loop.py", "--executor", "local", "args.lr=1e-3", "--", "fit", "--epochs", "3", "a=b", "--wait"
    )
    assert words_of(run) == ["fit", "--epochs", "3", "a=b", "--wait", "--lr", "1e-3"]
    assert given_words(run) == "arguments: fit --epochs 3 a=b --wait --lr 1e-3"


def test_a_script_that_knows_nothing_of_us_gets_them_too(project: Path) -> None:
    run = toolkit("submit", "plain.py", "--executor", "local", "--", "--epochs", "3")
    assert foreign.read_command(run) == [sys.executable, str(project / "plain.py"), "--epochs", "3"]
    assert given_words(run) == f"command: {sys.executable} {project / 'plain.py'} --epochs 3"
    run = toolkit("exec", "--executor", "local", "args.epochs=5", "--", "python", "plain.py", "--epochs", "3")
    assert foreign.read_command(run) == ["python", "plain.py", "--epochs", "5"]


def test_python_code_gives_them_as_a_list() -> None:
    run = submit.submit("loop.py", ["args.lr=0.5"], args=["--epochs", 3, "--lr", 0.1], executor="local")
    assert words_of(run.dir) == ["--epochs", "3", "--lr", "0.5"]


@pytest.mark.parametrize(
    ("argv", "advice"),
    [
        ("submit loop.py --epochs 3", "toolkit submit loop.py -- --epochs 3"),
        (
            "submit loop.py train.seed=1 --wait --lr=0.1 --amp x",
            "toolkit submit loop.py train.seed=1 --wait -- --lr=0.1 --amp x",
        ),
        ("submit --epochs 3 loop.py", "toolkit submit loop.py -- --epochs 3"),
        ("sweep loop.py optim.lr=1,2 --epochs 3", "toolkit sweep loop.py optim.lr=1,2 -- --epochs 3"),
        ("run loop.py --epochs 3", "toolkit run loop.py -- --epochs 3"),
        ("resume-check loop.py --epochs 3", "toolkit resume-check loop.py -- --epochs 3"),
        ("resume loop --epochs 3", "toolkit resume loop -- --epochs 3"),
    ],
)
def test_options_of_the_script_before_the_dashes_are_answered_by_the_line_to_write(
    argv: str, advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(argv.split())
    assert ended.value.code == EXIT_REQUEST
    assert f"\n    {advice}\n" in capsys.readouterr().err
    args = cli.parse(cli.build_parser(), advice.split()[1:])  # what it says can be written
    assert args.words == advice.partition(" -- ")[2].split()


def test_a_resume_keeps_the_arguments_and_may_change_one(capsys: pytest.CaptureFixture[str]) -> None:
    run = toolkit("submit", "loop.py", "--executor", "local", "--", "--epochs", "3", "--amp")
    ended = RunResult.from_json({"state": "completed", "why": ""})
    run.write_result(ended)
    assert cli.main(["resume", run.id, "train.epochs=20"]) == EXIT_REQUEST  # a loop does not read it
    assert f"`toolkit resume {run.id} args.NAME=VALUE` goes on" in capsys.readouterr().err
    toolkit("resume", run.id, "args.epochs=5")
    assert words_of(run) == ["--epochs", "5", "--amp"]
    run.write_result(ended)
    toolkit("resume", run.id, "--", "--epochs", "7")
    assert words_of(run) == ["--epochs", "7"]
    run.write_result(RunResult.from_json({"state": "stopped", "why": ""}))
    toolkit("resume", run.id)
    assert words_of(run) == ["--epochs", "7"]


def test_a_resumed_command_changes_by_option_only(capsys: pytest.CaptureFixture[str]) -> None:
    run = toolkit("submit", "plain.py", "--executor", "local", "--", "--epochs", "3")
    run.write_result(RunResult.from_json({"state": "failed", "why": ""}))
    assert cli.main(["resume", run.id, "--", "--epochs", "5"]) == EXIT_REQUEST
    assert "args.NAME=VALUE changes an option of it" in capsys.readouterr().err
    toolkit("resume", run.id, "args.epochs=5")
    assert foreign.read_command(run)[2:] == ["--epochs", "5"]


@pytest.mark.parametrize("script", ["loop.py", "plain.py"])
def test_arguments_are_swept(script: str, tmp_path: Path) -> None:
    asked = request.read(script, [configs.argv_override(["--amp"]), "args.epochs=1,2", "args.lr=0.10,1e-4"], Options())
    sent = submission.submit(asked, Path.cwd(), "slurm", FakeSlurm())
    assert [point.values["args.epochs"] for point in sent.points] == [1, 1, 2, 2]
    array = SweepDir(sent.sweep.path).arrays()[0]
    token = array.record().token
    runs = [element.claim(array, index, token) for index in range(4)]
    given = [" ".join(words_of(run)) for run in runs if run is not None]
    start = "" if script == "loop.py" else f"{sys.executable} {Path.cwd() / script} "
    assert given == [f"{start}--amp --epochs {epochs} --lr {lr}" for epochs in (1, 2) for lr in ("0.10", "1e-4")]


def test_a_rank_finds_them_in_its_argv(project: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "toolkit", "run", "loop.py", "args.lr=2", "--", "--epochs", "3", "it's"]
    done = subprocess.run(command, env=environ, cwd=project, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads((project / "argv.json").read_text()) == ["--epochs", "3", "it's", "--lr", "2"]
