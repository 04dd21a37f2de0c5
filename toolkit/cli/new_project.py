"""`toolkit new`: a project of the user's own, made from one of the examples."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from toolkit.base import fsio
from toolkit.base.errors import RequestError, did_you_mean
from toolkit.cli.arguments import new_path


class Example(NamedTuple):
    """An example to begin with: the job's file, the files next to it, and its config. A script has no config."""

    job: str
    others: tuple[str, ...] = ()
    config: str | None = None


_SCRIPTS = "tests/dist/library_scripts"
#: The examples by the names that ``--from`` takes.
EXAMPLES = {
    "classify": Example("jobs/classify.py", ("jobs/models.py",), "configs/digits_ddp.yaml"),
    "language_model": Example("jobs/language_model.py", ("jobs/llama.py",), "configs/gpt_fsdp.yaml"),
    "loop": Example("jobs/loop.py", (), "configs/digits_loop.yaml"),
    "lightning": Example(f"{_SCRIPTS}/lightning_after.py"),
    "transformers": Example(f"{_SCRIPTS}/transformers_after.py"),
    "accelerate": Example(f"{_SCRIPTS}/accelerate_after.py"),
}
#: The size of a script's run, which has no config to say it.
_SIZE = "cluster.tasks_per_node=2"

SBATCH = """#!/bin/bash
# sbatch {name}.sh [key=value ...], in this folder; sbatch's own arguments (--nodes=4) win over the lines below.
#SBATCH --job-name={name}
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
#SBATCH --time=00:30:00
#SBATCH --output=slurm-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
cd "${{SLURM_SUBMIT_DIR:-$PWD}}" || exit 2
trap '' HUP INT TERM USR1 USR2  # a stop that comes before toolkit has started must not end the job without a result
# Load your environment here: module load python; source .venv/bin/activate
exec toolkit {within}
"""

TEST = '''"""A run on this machine: `pytest`."""

from pathlib import Path

import pytest

import toolkit


def test_{name}_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    monkeypatch.setenv("TOOLKIT_RUNS", str(tmp_path))
    run = toolkit.submit("{target}", ["{override}"], executor="local")
    assert run.wait()["state"] == "completed"
'''

README = """# {name}

    toolkit submit {target}{size} --follow      # to Slurm, or on this machine where there is none
    sbatch {name}.sh                         # the same as a batch script
    toolkit tensorboard                     # the curves
    pytest                                  # a run on this machine

`{name}.py` is yours: change its data, its model, its loss.{more}
"""


def target(name: str, example: str) -> str:
    """Return what `toolkit submit` takes to run the project ``name``."""
    return f"{name}.py {_SIZE}" if EXAMPLES[example].config is None else f"{name}.yaml"


def create(folder: Path, example: str) -> list[Path]:
    """Make the project ``folder``, named by its last part, from an example. Return its files. Raises RequestError."""
    name = folder.name
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise RequestError(f"toolkit new: {name!r} cannot name a Python file; use a to z, 0 to 9 and _, a letter first")
    if example not in EXAMPLES:
        hint = did_you_mean(example, EXAMPLES)
        raise RequestError(f"toolkit new: --from: unknown example {example!r}; {hint}valid: {', '.join(EXAMPLES)}")
    new_path("toolkit new", str(folder))
    chosen = EXAMPLES[example]
    if name in {Path(file).stem for file in chosen.others}:
        raise RequestError(f"toolkit new: the example has a file {name}.py next to its job; choose another name")
    # The folder appears only when it is complete.
    files = _files(name, chosen)
    with fsio.atomic_path(folder) as made:
        made.mkdir()
        for file, text in files.items():
            (made / file).write_text(text)
    return [folder / file for file in sorted(files)]


def _files(name: str, example: Example) -> dict[str, str]:
    # The examples' paths start in the installed package, or in the checkout.
    package = Path(__file__).parents[1]
    source = package / "examples" if (package / "examples").is_dir() else package.parent
    is_script = example.config is None
    words = {
        "name": name,
        "target": f"{name}.py" if is_script else f"{name}.yaml",
        "size": f" {_SIZE}" if is_script else "",
        "override": _SIZE if is_script else "train.max_steps=20",
        "within": f'exec "$@" -- python {name}.py' if is_script else f'supervise {name}.yaml "$@"',
        "more": "" if is_script else f" `toolkit submit {name}.yaml --help-all` lists every\nkey that can be set.",
    }
    files = {"README.md": README.format(**words), f"{name}.sh": SBATCH.format(**words)}
    files[f"test_{name}.py"] = TEST.format(**words)
    if example.config is not None:
        text = re.sub(r"^name: .*$", f"name: {name}", (source / example.config).read_text(), count=1, flags=re.M)
        text = re.sub(r"^job: .*$", f"job: ./{name}.py", text, count=1, flags=re.M)
        # The comment at the head describes the example, not the project.
        files[f"{name}.yaml"] = re.sub(r"\A(#.*\n)+", "", text)
    # The project's files import each other without `jobs.`, and the job's file takes the project's name.
    for file in (example.job, *example.others):
        text = (source / file).read_text().replace("from jobs.", "from ").replace(example.job, f"{name}.py")
        text = text.replace(example.config or "\0", f"{name}.yaml")
        files[f"{name}.py" if file == example.job else Path(file).name] = text
    return files
