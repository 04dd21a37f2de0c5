"""The copies of a project's sources: out of sight of the project's tools, and a second one for fixed code."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.command import Command
from toolkit.base.errors import EXIT_DONE, ConfigError, RequestError, SlurmError
from toolkit.config import JobConfig
from toolkit.files import rundir
from toolkit.files.run_files import RunResult
from toolkit.files.rundir import RunDir
from toolkit.plugins.report import compare
from toolkit.plugins.sweep import request, submission
from toolkit.plugins.sweep.request import Options
from toolkit.plugins.testing.fake_slurm import FakeSlurm
from toolkit.run.submission import executors, submit
from toolkit.run.submission.handle import Run
from toolkit.run.submission.resume_run import resume

LOOP = "import toolkit\nfrom helper import f\nwith toolkit.start() as run:\n    f()\n"
TEST = "def test_nothing():\n    pass\n"


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.delenv("TOOLKIT_RUNS", raising=False)
    monkeypatch.setenv("TOOLKIT_SITE", str(tmp_path / "site.yaml"))
    (tmp_path / "site.yaml").write_text("{}")
    Path("loop.py").write_text(LOOP)
    Path("helper.py").write_text("def f() -> int:\n    return 1 / 0\n")
    monkeypatch.setattr(executors, "send", lambda run, config, executor, owner, **_: Run(run, executor, "1"))
    return tmp_path / "project"


def failed(run: RunDir) -> RunDir:
    run.write_result(RunResult.from_json({"state": "failed", "why": "boom"}))
    return run


def helper(code: Path) -> str:
    return (code / "helper.py").read_text().split()[-3]


def fix() -> None:
    Path("helper.py").write_text("def f() -> int:\n    return 2 / 1\n")


def test_tools_of_the_project_do_not_see_the_copies(project: Path) -> None:
    Path("test_loop.py").write_text(TEST)
    run = submit.submit("loop.py", executor="local").dir
    asked = request.read("loop.py", ["train.seed=1,2"], Options())
    submission.submit(asked, project, "slurm", FakeSlurm())
    assert (run.code / "test_loop.py").is_file()
    (project / "unused.py").write_text("import os\n")
    (run.code / "unused.py").write_text("import os\n")

    def tool(*words: str) -> str:
        command = [sys.executable, "-m", *words, "."]
        return subprocess.run(command, cwd=project, capture_output=True, text=True).stdout

    assert "1 passed" in tool("pytest", "-q", "-p", "no:cacheprovider")
    found = tool("ruff", "check", "--no-cache", "--isolated", "--select=F401", "--output-format=concise")
    assert "unused.py" in found
    assert ".code" not in tool("ruff", "check", "--no-cache", "--select=F401", "--output-format=concise")
    assert "4 source files" in tool("mypy", "--config-file=", "--cache-dir=/dev/null", "--follow-imports=skip")
    subprocess.run(["git", "init", "-q"], check=True)
    listed = subprocess.run(["git", "ls-files", "--others", "--exclude-standard"], capture_output=True, text=True)
    assert [line for line in listed.stdout.split() if "code" in line] == []


def test_a_resume_goes_on_with_the_copy_and_says_what_differs_from_it(command: Command) -> None:
    run = failed(submit.submit("loop.py", executor="local").dir)
    assert "note" not in command.ends(EXIT_DONE, "resume", run.id).err
    fix()
    Path("new.py").touch()  # a file that the run does not know
    failed(run)
    err = command.ends(EXIT_DONE, "resume", run.id).err
    assert f"note: helper.py in {Path.cwd()} differs from the run's copy" in err
    assert (helper(run.code), run.code_number) == ("1", 1)


def test_new_code_is_a_second_copy(command: Command) -> None:
    run = failed(submit.submit("loop.py", executor="local").dir)
    fix()
    assert "note" not in command.ends(EXIT_DONE, "resume", run.id, "--code", "train.seed=0").err
    assert (helper(run.code), run.code_number) == ("2", 2)
    assert helper(run.path / ".code/1") == "1"
    other = submit.submit("loop.py", executor="local").dir
    assert compare.facts(run, other)["environment"]["copy of the sources"] == ["2", None]
    resume(failed(run), code=True)
    assert run.code_number == 3


def test_a_copy_that_a_sweep_shares_stays_the_first(project: Path) -> None:
    asked = request.read("loop.py", ["train.seed=1,2"], Options())
    sent = submission.submit(asked, project, "slurm", FakeSlurm())
    run = sent.sweep.run_of(sent.sweep.points()[0])
    assert helper(run.code) == "1"
    fix()
    resume(failed(run), executor="slurm", code=True)
    assert (helper(run.code), helper(run.path / ".code/1"), run.code_number) == ("2", "1", 2)


def test_new_code_that_is_refused_or_not_sent_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    run = failed(submit.submit("loop.py", executor="local").dir)
    Path("loop.py").write_text("with toolkit.start(\n")
    with pytest.raises(ConfigError, match=r"loop\.py"):
        resume(run, code=True)
    Path("loop.py").write_text(LOOP)
    fix()

    def refuse(*_: object, **__: object) -> None:
        raise SlurmError("sbatch: error: no")

    monkeypatch.setattr(executors, "send", refuse)
    with pytest.raises(SlurmError):
        resume(run, code=True)
    assert (helper(run.code), run.code_number, run.result().state) == ("1", 1, "failed")
    assert not (run.path / ".code/2").exists()


def test_without_the_project_or_a_copy_there_is_no_new_code(project: Path, command: Command) -> None:
    Path("plain.py").write_text("print(1)\n")
    plain = failed(submit.submit("plain.py", executor="local").dir)
    with pytest.raises(RequestError, match=r"--code: run .* has no copy of its script: it runs where it lies"):
        resume(plain, code=True)
    run = failed(submit.submit("loop.py", executor="local").dir)
    runs = rundir.runs_root()
    project.rename(project.with_name("moved"))
    moved = RunDir(project.with_name("moved") / run.path.relative_to(runs.parent))
    with pytest.raises(RequestError, match=r"--code: the folder from which .* is not there any more"):
        resume(moved, code=True)
    command.refuses("resume", str(moved.path), "--code")


def test_a_run_is_resumed_in_the_folder_in_which_it_was_submitted(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative paths of a script, and of a command, mean the same then."""
    monkeypatch.setenv("TOOLKIT_RUNS", str(tmp_path / "runs"))
    started_in: list[Path] = []

    def send(run: RunDir, config: JobConfig, executor: str, owner: Any, **_: Any) -> Run:
        started_in.append(Path.cwd())
        return Run(run, executor, "1")

    monkeypatch.setattr(executors, "send", send)
    Path("plain.py").write_text("print(open('words.txt').read())\n")
    job = failed(submit.submit("loop.py", executor="local").dir)
    script = failed(submit.submit_command(["python", "plain.py"], executor="local").dir)
    monkeypatch.chdir(tmp_path)
    for run in (job, script):
        resume(run, executor="local")
        failed(run)
    assert started_in == [project] * 4
    assert Path.cwd() == tmp_path
    project.rename(tmp_path / "moved")
    resume(script, executor="local")
    assert started_in[4:] == [tmp_path]


def test_a_sweep_is_retried_in_the_folder_in_which_it_was_submitted(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = FakeSlurm()
    started_in: list[Path] = []
    sbatch = slurm.sbatch
    monkeypatch.setattr(slurm, "sbatch", lambda words: started_in.append(Path.cwd()) or sbatch(words))
    asked = request.read("loop.py", ["train.seed=1,2"], Options())
    sent = submission.submit(asked, project, "slurm", slurm)
    monkeypatch.chdir(tmp_path)
    slurm.cancel(f"{sent.jobs[0]}_0")
    assert len(submission.retry(sent.sweep, sent.sweep.points()[:1], slurm)[0]) == 1
    assert started_in == [project, project]
