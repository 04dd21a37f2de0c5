"""What the tab key offers, in a real bash too, and how long it takes."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.fuzz.harness import ROOT
from toolkit import registry
from toolkit.cli import completion
from toolkit.cli.main import commands
from toolkit.config import all_keys


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for path in ("gpt/20260101-000000-00000001", "gpt/20260102-000000-00000002", "digits/20260103-000000-00000003"):
        (tmp_path / "runs" / path).mkdir(parents=True)


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("toolkit st", ["status", "stacks", "stop"]),
        ("toolkit why g", ["gpt"]),
        ("toolkit why 20260102", ["20260102-000000-00000002"]),
        ("toolkit why ", ["digits", "gpt", *(f"2026010{n}-000000-0000000{n}" for n in (1, 2, 3))]),
        ("toolkit checkpoint v", ["verify"]),
        ("toolkit checkpoint verify dig", ["digits"]),
        ("toolkit status --sta", ["--state"]),
        ("toolkit report --p", []),  # an option that is hidden
        ("toolkit status --state fa", ["failed"]),
        ("toolkit submit configs/digits_ddp.", ["configs/digits_ddp.yaml"]),
        ("toolkit submit configs/digits_ddp.yaml train.max_s", ["train.max_steps="]),
        ("toolkit submit configs/digits_ddp.yaml --wait strategy.name=f", ["strategy.name=fsdp"]),
        ("toolkit submit configs/digits_ddp.yaml --executor sl", ["slurm"]),
        (
            "toolkit submit configs/digits_ddp.yaml data.name=",
            sorted(f"data.name={name}" for name in registry.names("datasets")),
        ),
        ("toolkit submit configs/digits_ddp.yaml cluster.exclusive=t", ["cluster.exclusive=true"]),
        ("toolkit exec -- python ", []),
        ("toolkit nothing ", []),
        ("toolkit why 'unclosed", []),
    ],
)
def test_the_tab_key_offers_what_fits_the_place(line: str, offered: list[str]) -> None:
    assert completion.complete(line) == offered


def test_all_commands_and_all_keys_are_offered() -> None:
    assert completion.complete("toolkit ") == commands()
    keys = completion.complete("toolkit submit configs/digits_ddp.yaml ")
    assert {f"{key}=" for key in all_keys()} - {"params="} <= set(keys) | {"params="}


@pytest.mark.parametrize("content", ["", "[]", '{"x": 1}', "\0"])
def test_damaged_keys_in_the_cache_are_read_again(content: str) -> None:
    expected = completion._keys()
    (path,) = Path(os.environ["XDG_CACHE_HOME"]).rglob("keys-*.json")
    path.write_text(content)
    assert completion._keys() == expected


def test_behind_a_verb_of_sweep_come_the_sweeps(runs: None, tmp_path: Path) -> None:
    (tmp_path / "runs/.sweeps/grid").mkdir(parents=True)
    assert completion.complete("toolkit sweep status ") == ["grid"]
    assert "optim.lr=" in completion.complete("toolkit sweep mine.yaml opt")


def in_bash(line: str, tmp_path: Path) -> list[str]:
    """Return what the script sets COMPREPLY to when bash calls it. bash divides the line into words in its own way."""
    program = tmp_path / "bin/toolkit"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m toolkit "$@"\n')
    program.chmod(0o755)
    script = completion.SCRIPTS["bash"] + 'COMP_LINE=$1 COMP_POINT=${#1}\n_toolkit\nprintf "%s\\n" "${COMPREPLY[@]}"\n'
    environ = os.environ | {"PATH": f"{program.parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script, "bash", line], env=environ, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_bash_gets_words_and_behind_a_key_only_the_value(tmp_path: Path) -> None:
    assert in_bash("toolkit st", tmp_path) == ["status", "stacks", "stop"]
    assert in_bash("toolkit submit configs/digits_ddp.yaml strategy.name=loc", tmp_path) == ["local_sgd"]


@pytest.mark.parametrize("shell", completion.SCRIPTS)
def test_the_script_of_each_shell_is_one(shell: str) -> None:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    subprocess.run([program, "-n"], input=completion.SCRIPTS[shell], text=True, check=True)


@pytest.mark.parametrize("line", ["toolkit why 2026", "toolkit submit configs/digits_ddp.yaml optim."])
def test_a_press_of_the_tab_key_takes_the_cpu_of_a_few_starts_of_python_and_no_torch(line: str) -> None:
    """The least of several counts, beside that of a Python that reads YAML: 100 ms beside 40 on a quiet machine."""
    code = "import sys; from toolkit.cli.main import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    commands = ([sys.executable, "-c", code, "__complete", "bash", line], [sys.executable, "-c", "import yaml"])
    taken: list[list[float]] = [[], []]
    for _ in range(6):
        for command, times in zip(commands, taken, strict=True):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    ours, plain = (min(times[1:]) for times in taken)  # the first fills the cache
    assert ours < 5 * plain, (ours, plain)
