"""`toolkit submit CONFIG --help`: every key with its type, value, default and comment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.command import Command
from toolkit.config import merged_layers

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
    assert "unknown key 'params.widht'; did you mean 'params.width'?" in err


def test_the_keys_are_shown_without_loading_the_job_or_torch(folder: Path) -> None:
    code = (
        "import sys\nfrom toolkit.cli.main import main\nmain(['submit', 'c.yaml', '--help'])\n"
        "assert not {'torch', 'submitit', 'omegaconf'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, timeout=60)
