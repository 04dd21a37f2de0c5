"""A user's own step: gradients of one process, exact resumes, and a small GAN."""

import ast
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from jobs import custom
from tests.dist import test_trainer as trainer
from tests.dist.ranks import in_run, refused_with, run_ranks
from tests.dist.strategy_cases import CLASSES, FEATURES, global_batch, part, snapshot
from toolkit.base.errors import ConfigError
from toolkit.config import StrategyConfig, load_config, validate
from toolkit.ranks.batch import Batch
from toolkit.ranks.session import Session
from toolkit.strategies import Custom, Strategy, build_strategy
from toolkit.train import job
from toolkit.train.loop import Result

pytestmark = pytest.mark.dist

CUSTOM = StrategyConfig("custom")


def train_pair_step(step: Custom, batch: Batch) -> Tensor:
    """Two networks that pull at each other, each with an optimizer of its own kind."""
    encode, decode = step.networks["encode"], step.networks["decode"]
    miss = (decode(encode(batch.inputs).detach()) - batch.inputs).square().sum() / batch.global_count
    step.descend("decode", miss)
    hidden = encode(batch.inputs)
    loss = ((decode(hidden) - batch.inputs).square().sum() + 0.1 * hidden.abs().sum()) / batch.global_count
    step.descend("encode", loss, step.lr / 2)
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
    strategy = Custom(CUSTOM, session, train_pair_step)
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
        # The decoder steps first, as in train_pair_step; the encoder then sees its new weights.
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


def idle(step: Custom, batch: Batch) -> Tensor:
    loss = step.networks["decode"](batch.inputs[:, :CLASSES]).sum() * 0
    bias = step.networks["encode"].get_parameter("0.bias")
    step.descend("decode", loss + bias.sum() * 0)
    step.descend("encode", bias.sum() * 0)
    return loss.detach()


def unused(session: Session) -> str:
    strategy = Custom(CUSTOM, session, idle)
    strategy.build(NETWORKS)
    return refused_with(lambda: strategy.step(part(strategy.share, 0), 0.1))


def test_a_loss_that_leaves_a_weight_out_is_refused_by_its_name() -> None:
    assert run_ranks(1, unused) == [
        "model: the loss does not depend on encode.0.weight; freeze such parameters (requires_grad_(False)) or use "
        "them in forward(), in every step and on every rank"
    ]


def misnamed(session: Session) -> list[str]:
    found = []
    for make in (lambda: Custom(StrategyConfig("fsdp"), session, idle), lambda: build_strategy(CUSTOM, session)):
        with pytest.raises(ConfigError) as caught:
            make()
        found.append(str(caught.value))
    return found


def test_a_toolkit_strategy_and_a_jobs_own_step_are_not_taken_for_each_other() -> None:
    ((ours, theirs),) = run_ranks(1, misnamed)
    assert ours.startswith("strategy.name: 'fsdp' is not what this job does")
    assert "see jobs/custom.py" in theirs


def train_gan(session: Session, run_dir: Path, dies_in: int | None = None) -> tuple[Result, dict[str, Tensor]]:
    session = in_run(session, run_dir)
    given = ["data.global_batch_size=50", "checkpoint.every_steps=4", "optim={name: adam, lr: 0.002}"]
    given += ["train={max_steps: 10, log_every: 1, eval_every: 5, epochs: 9}"]
    config = load_config("configs/gan.yaml", given, site=False)
    with closing(job.training_of(custom.Gan, config, None, session)) as training:
        if dies_in is not None:
            fail_in(training.trainer._loader, dies_in)
        return training.fit(), snapshot(training.strategy)


def fail_in(loader: Any, step: int) -> None:
    plain_at = loader.at

    def at(n: int) -> Batch | None:
        if n == step:
            raise OSError("the disk is gone")
        return plain_at(n)

    loader.at = at


def die(session: Session, run_dir: Path) -> None:
    with pytest.raises(OSError, match="the disk is gone"):
        train_gan(session, run_dir, 7)


def test_a_killed_gan_ends_with_the_same_bits_figure_and_images(tmp_path: Path) -> None:
    undisturbed = run_ranks(3, train_gan, tmp_path / "whole")
    run_ranks(3, die, tmp_path / "parts")
    for (result, state), (other, again) in zip(undisturbed, run_ranks(3, train_gan, tmp_path / "parts"), strict=True):
        assert other == result
        trainer.assert_same(again, state)
    assert trainer.logged(tmp_path / "parts", "eval/frechet").keys() == {5, 10}
    events = b"".join(path.read_bytes() for path in (tmp_path / "whole" / "tensorboard").glob("events*"))
    assert events.count(b"\x89PNG") == 3, "some real samples, and what was made after each evaluation"


def test_a_gans_figure_compares_normal_distributions_alike_on_any_number_of_ranks(
    tmp_path: Path,
) -> None:
    rows = torch.randn(500, 64, generator=torch.Generator().manual_seed(0)).double()
    assert custom.frechet(rows, rows) == pytest.approx(0, abs=1e-9)
    assert custom.frechet(rows + rows.new_ones(64), rows) == pytest.approx(shift_along_axes(rows), rel=1e-9)
    figures = [run_ranks(n, figure_of_first, tmp_path)[0] for n in (1, 3)]
    assert figures[0] == pytest.approx(figures[1], rel=1e-9)


def shift_along_axes(rows: Tensor) -> float:
    """Return how far a shift by one in each pixel moves the mean. Only the axes of greatest variance count."""
    _, axes = torch.linalg.eigh(torch.cov(rows.T))
    return float((torch.ones(64).double() @ axes[:, -custom.COMPONENTS :]).square().sum())


def figure_of_first(session: Session, folder: Path) -> float:
    config = load_config("configs/gan.yaml", site=False)
    with closing(job.training_of(custom.Gan, config, None, in_run(session, folder))) as training:
        judge = job.evaluation(training.job, training.job.eval_set(), session.world_size)
        found = judge(training.strategy, lambda: False)
    return found["frechet"]


def test_the_gan_job_is_short_and_refuses_keys_that_its_step_would_ignore() -> None:
    source = Path(custom.__file__).read_text()
    assert ast.get_docstring(ast.parse(source))
    assert len(source.splitlines()) <= 125
    config = load_config("configs/gan.yaml", ["train.precision=bf16"], site=False)
    with pytest.raises(ConfigError, match=r"train\.precision: the step of jobs\.custom is its own"):
        validate(config)
