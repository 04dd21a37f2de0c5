"""`toolkit new`: a project of one's own, made from one of the examples."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from toolkit import fsio
from toolkit.errors import RequestError, nearest


@dataclass(frozen=True)
class Example:
    """An example to begin with: files of ``jobs/``, the first of them the job, and its file in ``configs/``."""

    jobs: tuple[str, ...]
    config: str


EXAMPLES = {
    "classify": Example(("classify.py", "models.py"), "digits_ddp.yaml"),
    "language_model": Example(("language_model.py", "gpt.py"), "gpt_fsdp.yaml"),
    "loop": Example(("loop.py",), "digits_loop.yaml"),
}

SBATCH = """#!/bin/bash
# sbatch {name}.sh [key=value ...], in this folder; sbatch's own arguments (--nodes=4) win over the lines below.
#SBATCH --job-name={name}
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
#SBATCH --time=00:30:00
#SBATCH --output=slurm-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
set -euo pipefail
cd "${{SLURM_SUBMIT_DIR:-$PWD}}"
# Load your environment here: module load python; source .venv/bin/activate
exec toolkit supervise {name}.yaml "$@"
"""

TEST = '''"""A few steps on this machine: `pytest`."""

from pathlib import Path

import pytest

import toolkit


def test_{name}_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    monkeypatch.setenv("TOOLKIT_RUNS", str(tmp_path))
    run = toolkit.submit("{name}.yaml", ["train.max_steps=20"], executor="local")
    assert run.wait()["step"] == 20
'''

README = """# {name}

    toolkit submit {name}.yaml --follow      # to Slurm, or on this machine where there is none
    toolkit submit {name}.yaml --help        # every key that can be set
    sbatch {name}.sh                         # the same as a batch script
    toolkit tensorboard                     # the curves
    toolkit resume-check {name}.yaml         # a killed run ends with the same bits
    pytest                                  # a few steps, on this machine

`{name}.py` is the job: change its data, its model, its loss.
"""


def create(folder: Path, example: str) -> list[Path]:
    """Make the project ``folder``, named by its last part, from an example; return its files. Raises RequestError."""
    name = folder.name
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise RequestError(f"toolkit new: {name!r} is to name a Python file: use a to z, 0 to 9 and _, a letter first")
    if example not in EXAMPLES:
        hint = nearest(example, EXAMPLES)
        raise RequestError(f"toolkit new: --from: there is no {example!r}; {hint}valid: {', '.join(EXAMPLES)}")
    if folder.exists():
        raise RequestError(f"toolkit new: {folder} is there already; choose another name")
    if not folder.absolute().parent.is_dir():
        raise RequestError(f"toolkit new: {folder} is in a folder that does not exist")
    source, chosen = _sources(), EXAMPLES[example]
    if name in {Path(file).stem for file in chosen.jobs[1:]}:
        raise RequestError(f"toolkit new: the example has a file {name}.py beside its job; choose another name")
    files = {"README.md": README.format(name=name), f"{name}.sh": SBATCH.format(name=name)}
    files[f"test_{name}.py"] = TEST.format(name=name)
    files[f"{name}.yaml"] = _config((source / "configs" / chosen.config).read_text(), name)
    for number, file in enumerate(chosen.jobs):
        text = (source / "jobs" / file).read_text().replace("from jobs.", "from ")
        files[file if number else f"{name}.py"] = _as_own(text, chosen, name)
    with fsio.new_path(folder) as made:
        made.mkdir()
        for file, text in files.items():
            (made / file).write_text(text)
    return [folder / file for file in sorted(files)]


def _sources() -> Path:
    """Return the folder with ``jobs/`` and ``configs/``: in the installed package, or the checkout that it is in."""
    package = Path(__file__).parents[1]
    return package / "examples" if (package / "examples").is_dir() else package.parent


def _config(text: str, name: str) -> str:
    text = re.sub(r"^name: .*$", f"name: {name}", text, count=1, flags=re.M)
    text = re.sub(r"^job: .*$", f"job: ./{name}.py", text, count=1, flags=re.M)
    return re.sub(r"\A(#.*\n)+", "", text)


def _as_own(text: str, example: Example, name: str) -> str:
    """Return an example's source with its commands for the new project's files."""
    stem = Path(example.jobs[0]).stem
    return text.replace(f"configs/{example.config}", f"{name}.yaml").replace(f"jobs/{stem}.py", f"{name}.py")
