"""The keys of the config in the help of `toolkit sweep`."""

from __future__ import annotations

from pathlib import Path

from tests.command import Command
from tests.unit.cli.test_keys import folder  # noqa: F401
from toolkit.cli import main as cli


def test_a_sweep_shows_the_keys_too_whatever_values_it_has(folder: Path, command: Command) -> None:
    (folder / "c.yaml").write_text(f"{(folder / 'c.yaml').read_text()}\nsweep: {{optim.lr: [0.1, 0.2]}}\n")
    found = command("sweep", "c.yaml", "train.seed=0..4", "--help").splitlines()
    assert any(line.startswith("  train.epochs: int = 10") for line in found)


def test_a_metric_may_begin_with_a_minus() -> None:
    args = cli.parse(cli.build_parser(["sweep"]), ["sweep", "a.yaml", "--metric", "-eval/loss", "optim.lr=1,2"])
    assert (args.metric, args.overrides) == ("-eval/loss", ["optim.lr=1,2"])
