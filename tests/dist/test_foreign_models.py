"""Models of others' making with every strategy: the steps of one process, or a refusal by name before the first one."""

from __future__ import annotations

import random
import secrets
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dist.foreign_models import MODELS, OPTIMIZERS, STEPS, STRATEGIES, batch, made, on_one_process, refusal
from tests.dist.ranks import run_ranks
from tests.dist.strategy_cases import rates, whole
from toolkit.dist.session import Session
from toolkit.errors import ConfigError
from toolkit.strategies import build_strategy

pytestmark = pytest.mark.dist

TABLE = list(product(MODELS, STRATEGIES))
#: What CI takes of them, drawn anew in each run.
FEW = 14


def train(session: Session, pairs: list[tuple[str, str]]) -> list[str | tuple[list[float], dict[str, Any]]]:
    """The words of a refusal, or losses and weights, of each."""
    found: list[str | tuple[list[float], dict[str, Any]]] = []
    for model, name in pairs:
        foreign, config = MODELS[model], STRATEGIES[name]
        if config.name == "tensor":
            config = replace(config, tensor_plan=dict(foreign.plan), sequence_parallel=foreign.sequence)
        strategy = build_strategy(config, session)
        try:
            make, optimizer = partial(made, foreign), OPTIMIZERS[foreign.optimizer]
            strategy.build(make, optimizer, foreign.criterion, batch(strategy.share, 0))
        except ConfigError as error:
            found.append(str(error))
        else:
            losses = [strategy.step(batch(strategy.share, step), rates(step)).loss.item() for step in range(STEPS)]
            state = {name: entry for name, entry in strategy.state().items() if name.startswith("model/")}
            values = {n: whole(e).clone() if isinstance(e.value, Tensor) else e.value for n, e in state.items()}
            found.append((losses, values))
            strategy.close()
    return found


def hold_to_it(pairs: list[tuple[str, str]], limit_s: float) -> None:
    ranks = run_ranks(4, train, pairs, limit_s=limit_s)
    wrong = []
    for number, (model, strategy) in enumerate(pairs):
        try:
            _hold_one(model, strategy, [rank[number] for rank in ranks])
        except AssertionError as error:
            wrong.append(f"{model} with {strategy}: {str(error)[:400]}")
    assert not wrong, "\n".join(wrong)


def _hold_one(model: str, strategy: str, ranks: list[Any]) -> None:
    words = refusal(model, strategy)
    if words is not None:
        assert all(isinstance(found, str) and words in found for found in ranks), ranks[0]
        return
    assert not isinstance(ranks[0], str), ranks[0]
    losses, weights = on_one_process(MODELS[model])
    assert [sum(found[0][step] for found in ranks) for step in range(STEPS)] == pytest.approx(losses, abs=2e-6)
    for found in ranks:
        for name, value in weights.items():
            mine = found[1][f"model/{name}"]
            if isinstance(value, Tensor):
                torch.testing.assert_close(mine, value, atol=1e-6, rtol=0, msg=f"{name} {(mine - value).abs().max()}")
            else:
                assert mine == value


def test_a_sample_of_models_trains_as_on_one_process_or_is_refused() -> None:
    seed = secrets.randbelow(10**6)
    print(f"seed {seed}")
    hold_to_it(random.Random(seed).sample(TABLE, FEW), limit_s=120)


@pytest.mark.soak
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_model_trains_as_on_one_process_or_is_refused(strategy: str) -> None:
    hold_to_it([pair for pair in TABLE if pair[1] == strategy], limit_s=300)
