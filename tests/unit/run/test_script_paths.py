"""Which paths may be part of a job's script. How a shell reads those paths."""

import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.base.errors import RequestError
from toolkit.config import JobConfig
from toolkit.files.rundir import RunDir
from toolkit.run.prepare.new_run import new_run, refuse_unfit
from toolkit.run.submission import executors, submit
from toolkit.run.submission.resume_run import resume

ODD = """it's "my" $HOME `touch hit`; ${A=$(touch hit)} #x & (a) [b] {c} * ? ~ ! | <d> = , ü"""


@pytest.mark.parametrize(
    "name",
    ["x" * 300, "/dev/null", "100%", "a%j", "a\\b", "a:b", "a\nb", "a\rb", "a\x1bb", "a\u2028b", "a\udcffb"],
)
def test_a_folder_for_runs_that_slurm_or_python_would_misread_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOOLKIT_RUNS", str(tmp_path / name))
    for enter in (lambda: new_run(JobConfig(), None), lambda: submit.dry_run({}, executor="slurm")):
        with pytest.raises(RequestError, match=r"the folder for runs: .* set TOOLKIT_RUNS"):
            enter()
    with pytest.raises(RequestError, match="the folder for runs"):
        resume(RunDir(tmp_path / name / "run" / "20260102-030405-abcd"))
    assert not list(tmp_path.iterdir())


def test_a_current_folder_and_a_python_in_two_lines_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a\nb").mkdir()
    monkeypatch.chdir(tmp_path / "a\nb")
    with pytest.raises(RequestError, match="the current folder: "):
        refuse_unfit(Path("/runs"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", "/a\nb/python")
    with pytest.raises(RequestError, match="Python: "):
        refuse_unfit(Path("/runs"))


def test_no_character_of_another_path_means_anything_to_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracle is bash: it must take the paths literally, and run nothing else."""
    run = RunDir(tmp_path / ODD / "x/y")
    refuse_unfit(run.path)
    python = tmp_path / ODD / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$PYTHONPATH" "$TOOLKIT_RUNS" "$4"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    script = executors.sbatch_script(JobConfig(), run)
    environ = {"PATH": "/usr/bin:/bin", "PYTHONPATH": "/mine"}
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"{run.code}:/mine\n{tmp_path / ODD}\n{run.submitit}\n", "")
    assert not list(tmp_path.rglob("hit"))
