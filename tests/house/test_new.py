"""`toolkit new` makes a complete project, and names what it cannot make."""

import ast
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.command import Command
from toolkit.base.errors import EXIT_DONE
from toolkit.cli import main as cli
from toolkit.cli.new_project import EXAMPLES


@pytest.fixture(autouse=True)
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("example", EXAMPLES)
def test_a_new_project_can_be_submitted_as_it_is_and_knows_nothing_of_the_example(
    example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["new", "demo", "--from", example]) == EXIT_DONE
    told = capsys.readouterr().out
    project = tmp_path / "demo"
    assert {str(path.relative_to(tmp_path)) for path in project.iterdir()} <= set(told.splitlines())
    assert {path.name for path in project.iterdir()} >= {"demo.py", "demo.sh", "test_demo.py", "README.md"}
    for path in project.glob("*.py"):
        modules = [node.module for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        assert not any(module and module.startswith("jobs") for module in modules)
        assert "configs/" not in path.read_text()
    monkeypatch.chdir(project)
    if EXAMPLES[example].config is not None:
        code = cli.main(["submit", "demo.yaml", "--dry-run", "--executor", "slurm"])
        shown = capsys.readouterr()
        assert code == EXIT_DONE, shown.err
        assert "job: ./demo.py" in shown.out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["Demo"], "'Demo' cannot name a Python file"),
        (["there"], "there already exists"),
        (["no/where"], "is in a folder that does not exist"),
        (["demo", "--from", "clasify"], "did you mean 'classify'?"),
        (["models", "--from", "classify"], "the example has a file models.py next to its job"),
    ],
)
def test_what_cannot_be_made_is_said_and_nothing_is_left(
    argv: list[str], words: str, tmp_path: Path, command: Command
) -> None:
    (tmp_path / "there").mkdir()
    assert words in command.refuses("new", *argv)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


@pytest.mark.parametrize("script", ["sbatch/ddp_4node.sh", "sbatch/ddp_het.sh", "demo.sh"])
def test_a_batch_script_survives_an_activation_that_reads_unset_variables(script: str, tmp_path: Path) -> None:
    shutil.copytree(Path(__file__).parents[2] / "sbatch", tmp_path / "sbatch")
    assert cli.main(["new", "demo"]) == EXIT_DONE
    place, activate = "# Load your environment here: ", "source .venv/bin/activate"
    text = (tmp_path / "demo/demo.sh").read_text()
    assert f"{place}module load python; {activate}" in text
    (tmp_path / "demo.sh").write_text(text.replace(place, f"{activate} #"))
    for name, content in {
        "jobs/classify.py": "",
        ".venv/bin/activate": 'PS1="(env) $PS1_OF_NOBODY"\nfalse\nfalse | true\nexport PATH=$PWD/.venv/bin:$PATH\n',
        ".venv/bin/toolkit": '#!/bin/sh\necho "toolkit $1"\n',
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    (tmp_path / ".venv/bin/toolkit").chmod(0o755)
    environ = {"PATH": "/usr/bin:/bin", "SLURM_SUBMIT_DIR": str(tmp_path), "HOME": os.environ["HOME"]}
    done = subprocess.run(["bash", tmp_path / script], env=environ, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("toolkit supervise\n", 0), done.stderr
