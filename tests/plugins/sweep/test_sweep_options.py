"""The keys of the config in the help of `toolkit sweep`."""

from pathlib import Path

import pytest

from tests.command import Command
from tests.pages import ROOT
from tests.unit.cli.test_keys import folder  # noqa: F401
from toolkit.base.errors import ConfigError
from toolkit.cli import main as cli
from toolkit.plugins.sweep import request


def test_a_sweep_shows_the_keys_too_whatever_values_it_has(folder: Path, command: Command) -> None:
    (folder / "c.yaml").write_text(f"{(folder / 'c.yaml').read_text()}\nsweep: {{optim.lr: [0.1, 0.2]}}\n")
    found = command("sweep", "c.yaml", "train.seed=0..4", "--help").splitlines()
    assert any(line.startswith("  train.epochs: int = 10") for line in found)


def test_a_metric_may_begin_with_a_minus() -> None:
    args = cli.parse(cli.build_parser(["sweep"]), ["sweep", "a.yaml", "--metric", "-eval/loss", "optim.lr=1,2"])
    assert (args.metric, args.overrides) == ("-eval/loss", ["optim.lr=1,2"])


ROUNDS = "strategy.local_sgd.round_steps"


@pytest.mark.parametrize("words", [[f"{ROUNDS}=4"], [f"{ROUNDS}=4,8"]])
def test_a_key_of_one_strategy_goes_with_a_sweep_over_several(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    asked = request.read("configs/digits_ddp.yaml", ["strategy.name=ddp,local_sgd", *words], request.Options())
    points = request.check_points(asked, ROOT, "slurm")
    assert {point.config.strategy.name for point in points} == {"ddp", "local_sgd"}
    with pytest.raises(ConfigError, match=f"{ROUNDS}: changes nothing while strategy.name is ddp; .*at the point"):
        request.check_points(
            request.read("configs/digits_ddp.yaml", [f"{ROUNDS}=4,8"], request.Options()), ROOT, "slurm"
        )
