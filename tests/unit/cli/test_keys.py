"""`toolkit submit CONFIG --help`: every key with its type, value, default and comment."""

import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command import Command
from tests.house.fuzz.harness import ROOT
from toolkit import registry
from toolkit.cli.commands import completion
from toolkit.cli.keys import FIRST
from toolkit.cli.main import commands
from toolkit.config import all_keys, merged_layers

JOB = '''
import torch_of_nobody
from dataclasses import dataclass, field

@dataclass
class Block:
    heads: int = 4  # of the attention

@dataclass
class Params:
    """The network.

    Nobody reads further.
    """

    width: int
    #: what is left out,
    #: as a part of 1
    dropout: float | None = None
    block: Block = field(default_factory=lambda: Block(heads=8))

def main(config): print(config)
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("TOOLKIT_SITE", raising=False)
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "c.yaml").write_text("job: job.py\nparams: {dropout: 0.1}\noptim: {lr: 2.0}\n")
    return tmp_path


def test_the_jobs_own_keys_come_first_with_what_the_config_changes(folder: Path, command: Command) -> None:
    found = command("submit", "c.yaml", "params.block.heads=2", "--help").splitlines()
    assert found[3:11] == [
        "params of job.py: The network.",
        "  params.width: int must be given",
        "* params.dropout: float | null = 0.1    default null; what is left out, as a",
        "                                        part of 1; from c.yaml",
        "* params.block.heads: int = 2           default 8; of the attention; from",
        "                                        argument 'params.block.heads=2'",
        "",
        "the run:",
    ]
    assert "* optim.lr: float = 2.0                 default 0.05; the rate after the warm-" in found
    assert "  train.precision: str = fp32           one of fp32, bf16, fp16; what the model" in found


def test_each_value_names_the_layer_that_it_comes_from(
    folder: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    (folder / "site.yaml").write_text("cluster: {account: lab, time_min: 60, mem_gb: 8}\n")
    (folder / "base.yaml").write_text("job: job.py\ncluster: {time_min: 70}\noptim: {lr: 0.2, weight_decay: 0.0}\n")
    (folder / "top.yaml").write_text("extends: base.yaml\nparams: {width: 1}\noptim: {lr: 0.3, momentum: 0.5}\n")
    monkeypatch.setenv("TOOLKIT_SITE", str(folder / "site.yaml"))
    monkeypatch.setenv("SBATCH_QOS", "short")
    origins: dict[str, str] = {}
    merged_layers("top.yaml", ["train.epochs=3", "optim.momentum=0.6"], origins=origins)
    assert {key: origin for key, origin in origins.items() if "." in key or key == "name"} == {
        "name": "the file's name",
        "cluster.account": f"{folder}/site.yaml",
        "cluster.mem_gb": f"{folder}/site.yaml",
        "cluster.qos": "$SBATCH_QOS",
        "cluster.time_min": "base.yaml",
        "optim.weight_decay": "base.yaml",
        "optim.lr": "top.yaml",
        "optim.momentum": "argument 'optim.momentum=0.6'",
        "params.width": "top.yaml",
        "train.epochs": "argument 'train.epochs=3'",
    }
    found = command("submit", "top.yaml", "--help").splitlines()
    assert "* cluster.qos: str | null = short       default null; from $SBATCH_QOS" in found


def test_without_a_config_help_is_the_commands_own(folder: Path, command: Command) -> None:
    assert "--dry-run" in command("submit", "--help")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("job: gone.py\n", "params: job: there is no file"),
        ("job: plain.py\n", "plain.py declares no keys of its own; how it can: docs/config.md"),
    ],
)
def test_a_job_without_own_keys_has_all_others(text: str, says: str, folder: Path, command: Command) -> None:
    (folder / "plain.py").write_text("def main(config): print(config)")
    (folder / "c.yaml").write_text(text)
    found = command("submit", "c.yaml", "--help").splitlines()
    assert says in found[3]
    assert any(line.startswith("  train.epochs: int = 10") for line in found)


def test_a_config_that_cannot_be_read_is_refused(folder: Path, command: Command) -> None:
    err = command.refuses("submit", "c.yaml", "--help", "params.widht=3")
    assert "params.widht: unknown key; did you mean 'params.width'?" in err


def test_the_keys_are_shown_without_loading_the_job_or_torch(folder: Path) -> None:
    code = (
        "import sys\nfrom toolkit.cli.main import main\nmain(['submit', 'c.yaml', '--help'])\n"
        "assert not {'torch', 'submitit', 'omegaconf'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, timeout=60)


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


OWN = {"params.width", "params.dropout", "params.block.heads"}


@pytest.mark.parametrize("name", ["submit", "run", "supervise", "resume-check"])
def test_every_key_is_listed_within_the_width_of_a_terminal(name: str, folder: Path, command: Command) -> None:
    (folder / "c.yaml").write_text(
        f"job: job.py\nparams: {{width: 3}}\nname: {'n' * 99}\nnotify: {{command: [{'x' * 150}]}}\n"
    )
    found = command(name, "c.yaml", "--help-all").splitlines()
    assert max(len(line) for line in found if "xxx" not in line and "nnn" not in line) <= 80
    assert names(found) == OWN | set(all_keys()) - {"params"}


def test_the_short_page_explains_first_and_set_keys_and_names_all_others(folder: Path, command: Command) -> None:
    first = {f"{section}.{name}".lstrip(".") for section, words in FIRST.items() for name in words.split()}
    assert 25 <= len(first) <= 35
    assert first < set(all_keys())
    found = command("submit", "c.yaml", "train.pruning.amount=0.5", "-h").splitlines()
    assert max(map(len, found)) <= 80
    rest = found.index("More keys, by section; --help-all in place of --help shows what they are for:")
    assert names(found[:rest]) == OWN | first | {"train.pruning.amount"}
    listed = set[str]()
    for section, words in re.findall(r"^  ([a-z][a-z ]+): ((?:.|\n    )*)", "\n".join(found[rest:]), re.MULTILINE):
        prefix = "" if section == "the run" else f"{section}."
        listed |= {f"{prefix}{word}" for word in re.split(r",\s+", words)}
    assert listed == set(all_keys()) - first - {"train.pruning.amount", "params"}


def names(found: list[str]) -> set[str]:
    """Return the keys that have a line of their own."""
    return {line[2:].partition(":")[0] for line in found if line[:2] in ("  ", "* ") and line[2:3].strip()}
