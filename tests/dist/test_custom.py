"""A step of one's own: gradients of one process, exact resumes, and the small GAN that shows it."""

from __future__ import annotations

import ast
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from jobs import custom
from tests.dist import test_trainer as trainer
from tests.dist.ranks import run_ranks
from tests.dist.strategy_cases import CLASSES, FEATURES, global_batch, part, snapshot
from toolkit.config import JobConfig, OptimConfig, StrategyConfig, TrainConfig, load_config, validate
from toolkit.data.datasets import build_datasets
from toolkit.data.loader import BatchedSamples, Loader, build_loader
from toolkit.dist.batch import Batch
from toolkit.dist.session import Session
from toolkit.errors import ConfigError
from toolkit.strategies import Custom, Strategy, build_strategy
from toolkit.train.loop import Result, Trainer
from toolkit.train.optim import build_optimizer, build_schedule
from toolkit.train.seeds import prepare
from toolkit.train.state import Checkpoints, identity

pytestmark = pytest.mark.dist

CUSTOM = StrategyConfig("custom")


class Pair(Custom):
    """Two networks that pull at each other, each with an optimizer of its own kind."""

    def train_step(self, batch: Batch, lr: float) -> Tensor:
        encode, decode = self.networks["encode"], self.networks["decode"]
        miss = (decode(encode(batch.inputs).detach()) - batch.inputs).square().sum() / batch.global_count
        self.descend("decode", miss, lr)
        hidden = encode(batch.inputs)
        loss = ((decode(hidden) - batch.inputs).square().sum() + 0.1 * hidden.abs().sum()) / batch.global_count
        self.descend("encode", loss, lr / 2)
        return loss.detach()


def encoder() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(FEATURES, CLASSES), nn.Tanh())


def decoder() -> nn.Module:
    torch.manual_seed(2)
    return nn.Linear(CLASSES, FEATURES)


NETWORKS: dict[str, Any] = {
    "encode": (encoder, lambda net: torch.optim.AdamW(net.parameters(), 0.01)),
    "decode": (decoder, lambda net: torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)),
}


def train_pair(session: Session, size: int) -> tuple[list[float], dict[str, Tensor]]:
    strategy = Pair(CUSTOM, session)
    strategy.build(NETWORKS)
    missing = [name for name in vars(Strategy) if not name.startswith("_") and not hasattr(strategy, name)]
    assert missing == [], "the loop may ask for it"
    strategy.state()
    return [strategy.step(part(strategy.share, n, size), 0.1).loss.item() for n in range(4)], snapshot(strategy)


def oracle(size: int) -> tuple[list[float], dict[str, Tensor]]:
    encode, decode = encoder(), decoder()
    adam, sgd = NETWORKS["encode"][1](encode), NETWORKS["decode"][1](decode)
    adam.param_groups[0]["lr"] = 0.05
    losses = []
    for step in range(4):
        inputs, _ = global_batch(step, size)
        sgd.zero_grad()
        ((decode(encode(inputs).detach()) - inputs).square().sum(1).mean()).backward()
        sgd.step()
        adam.zero_grad()
        hidden = encode(inputs)
        loss = (decode(hidden) - inputs).square().sum(1).mean() + 0.1 * hidden.abs().sum(1).mean()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    return losses, nn.ModuleDict({"encode": encode, "decode": decode}).state_dict()


@pytest.mark.parametrize("world_size", [1, 3])
def test_two_optimizers_step_as_in_one_process_however_the_batch_is_shared(world_size: int) -> None:
    losses, weights = oracle(10)
    ranks = run_ranks(world_size, train_pair, 10)
    assert np.allclose(np.sum([rank[0] for rank in ranks], axis=0), losses, atol=1e-5)
    slots = {"optim/encode.0.weight/exp_avg", "optim/encode.0.bias/step", "optim/decode.weight/momentum_buffer"}
    for _, state in ranks:
        assert state.keys() >= {f"model/{name}" for name in weights} | slots
        for name, weight in weights.items():
            torch.testing.assert_close(state[f"model/{name}"], weight, atol=1e-5, rtol=0)


class Idle(Pair):
    def train_step(self, batch: Batch, lr: float) -> Tensor:
        loss = self.networks["decode"](batch.inputs[:, :CLASSES]).sum() * 0
        self.descend("decode", loss + self.networks["encode"][0].bias.sum() * 0, lr)
        self.descend("encode", self.networks["encode"][0].bias.sum() * 0, lr)
        return loss.detach()


def unused(session: Session) -> str:
    strategy = Idle(CUSTOM, session)
    strategy.build(NETWORKS)
    with pytest.raises(ConfigError) as caught:
        strategy.step(part(strategy.share, 0), 0.1)
    return str(caught.value)


def test_a_loss_that_leaves_a_weight_out_is_refused_by_its_name() -> None:
    assert run_ranks(1, unused) == [
        "model: the loss does not depend on encode.0.weight; freeze such parameters (requires_grad_(False)) or use "
        "them in forward(), in every step and on every rank"
    ]


def misnamed(session: Session) -> list[str]:
    found = []
    for make in (lambda: Pair(StrategyConfig("fsdp"), session), lambda: build_strategy(CUSTOM, session)):
        with pytest.raises(ConfigError) as caught:
            make()
        found.append(str(caught.value))
    return found


def test_a_strategy_of_the_toolkit_is_not_taken_for_a_step_of_ones_own_nor_the_other_way_round() -> None:
    ((ours, theirs),) = run_ranks(1, misnamed)
    assert ours.startswith("strategy.name: 'fsdp' is not what this job does")
    assert "see jobs/custom.py" in theirs


# ------------------------------------------------------------------------------------------------------------ the GAN


def train_gan(session: Session, run_dir: Path, dies_in: int | None = None) -> tuple[Result, dict[str, Tensor]]:
    session = replace(session, run_dir=run_dir)
    job = load_config("configs/gan.yaml", ["data.global_batch_size=50", "checkpoint.every_steps=4"], site=False)
    config = TrainConfig(max_steps=10, log_every=1, eval_every=5, epochs=9)
    prepare(config.seed)
    data = build_datasets(job.data)
    assert isinstance(data.eval, BatchedSamples)
    strategy = custom.Gan(CUSTOM, session)
    loader = build_loader(data.train, job.data, strategy.share, seed=0)
    if dies_in is not None:
        fail_in(loader, dies_in)
    optimizer = partial(build_optimizer, OptimConfig("adam", lr=0.002))
    strategy.build({"generator": (custom.generator, optimizer), "discriminator": (custom.discriminator, optimizer)})
    checkpoints = Checkpoints(job.checkpoint, session, strategy, identity(JobConfig()))
    schedule = partial(build_schedule, OptimConfig("adam", lr=0.002))
    fit = Trainer(config, session, strategy, loader, schedule=schedule, checkpoints=checkpoints).fit
    result = fit(partial(custom.quality, data.eval), show=partial(custom.show, strategy, data.eval))
    return result, snapshot(strategy)


def fail_in(loader: Loader, step: int) -> None:
    plain_at = loader.at

    def at(n: int) -> Batch | None:
        if n == step:
            raise OSError("the disk is gone")
        return plain_at(n)

    loader.at = at  # type: ignore[method-assign]


def die(session: Session, run_dir: Path) -> None:
    with pytest.raises(OSError, match="the disk is gone"):
        train_gan(session, run_dir, 7)


def test_a_killed_gan_ends_bit_for_bit_like_the_undisturbed_one_with_its_figure_and_images(tmp_path: Path) -> None:
    undisturbed = run_ranks(3, train_gan, tmp_path / "whole")
    run_ranks(3, die, tmp_path / "parts")
    for (result, state), (other, again) in zip(undisturbed, run_ranks(3, train_gan, tmp_path / "parts"), strict=True):
        assert other == result
        trainer.assert_same(again, state)
    assert trainer.logged(tmp_path / "parts", "eval/frechet").keys() == {5, 10}
    events = b"".join(path.read_bytes() for path in (tmp_path / "whole" / "tensorboard").glob("events*"))
    assert events.count(b"\x89PNG") == 2


def test_the_figure_of_a_gan_is_that_of_the_normal_distributions_and_the_same_on_any_number_of_ranks(
    tmp_path: Path,
) -> None:
    spread = np.diag([1.0, 4.0])
    assert custom.frechet(np.zeros(2), spread, np.zeros(2), spread) == pytest.approx(0, abs=1e-12)
    assert custom.frechet(np.zeros(2), spread, np.array([3.0, 4.0]), np.eye(2)) == pytest.approx(25 + 1)
    figures = [run_ranks(n, quality_of_first, tmp_path)[0] for n in (1, 3)]
    assert figures[0] == pytest.approx(figures[1], rel=1e-9)


def quality_of_first(session: Session, folder: Path) -> float:
    data = build_datasets(load_config("configs/gan.yaml", site=False).data)
    assert isinstance(data.eval, BatchedSamples)
    prepare(0)
    strategy = custom.Gan(CUSTOM, session)
    sgd = partial(build_optimizer, OptimConfig())
    strategy.build({"generator": (custom.generator, sgd)})
    found = custom.quality(data.eval, strategy, lambda: False)
    assert found is not None
    return found["frechet"]


def test_the_job_is_short_enough_to_copy_and_its_config_takes_no_key_that_its_step_would_ignore() -> None:
    source = Path(custom.__file__).read_text()
    assert ast.get_docstring(ast.parse(source))
    assert len(source.splitlines()) <= 125
    config = load_config("configs/gan.yaml", ["train.precision=bf16"], site=False)
    with pytest.raises(ConfigError, match=r"train\.precision: the step of jobs\.custom is its own"):
        validate(config)
