"""nn.DataParallel on a CPU: one process, with the plain model's names and steps."""

import logging

import pytest
import torch
from torch import Tensor, nn

from tests.dist.objectives import cross_entropy
from tests.dist.ranks import refused_with, run_ranks, told_by_us
from tests.dist.strategy_cases import OPTIMIZERS, oracle, part, plain_model, rates, snapshot
from toolkit.config import StrategyConfig, TrainConfig
from toolkit.ranks.session import Session
from toolkit.strategies import build_strategy, criterion_objective
from toolkit.strategies.spmd import Spmd

pytestmark = pytest.mark.dist


def train(session: Session) -> tuple[list[float], dict[str, Tensor], type, list[str]]:
    told = told_by_us()
    logging.getLogger("toolkit").setLevel(logging.INFO)
    strategy = build_strategy(StrategyConfig("dp"), session, TrainConfig(accumulate=3))
    assert isinstance(strategy, Spmd)
    strategy.build(plain_model, OPTIMIZERS["adamw"], criterion_objective(cross_entropy), part(strategy.share, 0))
    losses = [strategy.step(part(strategy.share, n), rates(n)).loss.item() for n in range(4)]
    passes = strategy._layout._passes  # type: ignore[attr-defined]
    return losses, snapshot(strategy), type(passes), told


def test_it_trains_the_model_in_data_parallel_and_says_why_ddp_is_better() -> None:
    losses, weights = oracle("adamw", cross_entropy, 10)
    ((found, state, passes, told),) = run_ranks(1, train)
    assert passes is nn.DataParallel
    assert found == pytest.approx(losses, abs=1e-6)
    for name, weight in weights.items():
        torch.testing.assert_close(state[f"model/{name}"], weight, atol=1e-6, rtol=0)
    assert any("ddp with a rank for each GPU does neither" in line for line in told)


def refused(session: Session, options: TrainConfig, recompute: bool) -> str:
    return refused_with(
        lambda: build_strategy(StrategyConfig("dp", activation_checkpointing=recompute), session, options)
    )


def test_several_ranks_and_what_copies_of_the_model_would_break_are_refused() -> None:
    assert all("there are 2 ranks; use ddp" in told for told in run_ranks(2, refused, TrainConfig(), False))
    assert run_ranks(1, refused, TrainConfig(compile=True), False)[0].startswith("train.compile: dp copies")
    assert run_ranks(1, refused, TrainConfig(), True)[0].startswith("strategy.activation_checkpointing: dp copies")
