"""Foreign models with every strategy.

Each takes the steps of one process, or is refused by name before the first step.
"""

import copy
import random
import secrets
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dist.foreign_models import (
    FUSED,
    MODELS,
    OPTIMIZERS,
    STEPS,
    STRATEGIES,
    WIDTH,
    Attention,
    Counts,
    Foreign,
    Gated,
    batch,
    chain,
    made,
    on_one_process,
    refusal,
)
from tests.dist.objectives import cross_entropy
from tests.dist.ranks import refused_with, run_ranks
from tests.dist.strategy_cases import rates, whole
from toolkit.base.errors import ConfigError
from toolkit.checkpoint.folder import CheckpointFolder
from toolkit.checkpoint.reader import load
from toolkit.checkpoint.writer import save
from toolkit.config import StrategyConfig, TrainConfig
from toolkit.ranks.batch import Batch
from toolkit.ranks.session import Session
from toolkit.strategies import build_strategy, criterion_objective

pytestmark = pytest.mark.dist

TABLE = list(product(MODELS, STRATEGIES))
#: What CI takes of them, drawn anew in each run.
FEW = 14


def values(state: Any) -> dict[str, Any]:
    """A copy of a strategy's state, of tensors the whole."""
    return {n: whole(e).clone() if isinstance(e.value, Tensor) else e.value for n, e in state.items()}


def train(session: Session, pairs: list[tuple[str, str]]) -> list[str | tuple[list[float], dict[str, Any]]]:
    """Return for each pair the words of a refusal, or losses and weights."""
    found: list[str | tuple[list[float], dict[str, Any]]] = []
    for model, name in pairs:
        foreign, config = MODELS[model], STRATEGIES[name]
        if config.name == "tensor":
            config = replace(config, tensor_plan=dict(foreign.plan), sequence_parallel=foreign.sequence)
        strategy = build_strategy(config, session)
        try:
            make, optimizer = partial(made, foreign), OPTIMIZERS[foreign.optimizer]
            strategy.build(
                make, optimizer, criterion_objective(copy.deepcopy(foreign.criterion)), batch(strategy.share, 0)
            )
        # Only the build may refuse: a step that fails is an error.
        except ConfigError as error:
            found.append(str(error))
        else:
            losses = [strategy.step(batch(strategy.share, step), rates(step)).loss.item() for step in range(STEPS)]
            found.append((losses, values(strategy.state())))
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
            mine = found[1][name]
            if isinstance(value, Tensor):
                torch.testing.assert_close(mine, value, atol=1e-6, rtol=0, msg=f"{name} {(mine - value).abs().max()}")
            else:
                assert mine == value


def test_a_sample_of_models_trains_as_on_one_process_or_is_refused() -> None:
    seed = secrets.randbelow(10**6)
    print(f"seed {seed}")
    hold_to_it(random.Random(seed).sample(TABLE, FEW), limit_s=120)


def go_on(session: Session, folder: Path) -> list[dict[str, Any]]:
    """Save layers in parts, and let two other strategies continue from them. Return the state of all three."""
    checkpoints, found = CheckpointFolder(folder), list[Any]()
    for name in ("tensor", "tensor x shards", "ddp"):
        config = STRATEGIES[name]
        plan = dict(FUSED) if config.name == "tensor" else {}
        strategy = build_strategy(replace(config, tensor_plan=plan), session, TrainConfig(ema_decay=0.5))
        make = partial(made, Foreign(lambda: nn.Sequential(*chain(Attention(), Gated()), Counts())))
        strategy.build(make, OPTIMIZERS["adamw"], criterion_objective(cross_entropy), batch(strategy.share, 0))
        place = {"rank": session.rank, "world_size": session.world_size, "kv": session.store}
        if found:
            loaded = load(checkpoints, strategy.state(), attempt=len(found), **place)  # type: ignore[arg-type]
            strategy.on_loaded({**loaded.values, "step": 2})
        else:
            for step in range(2):
                strategy.step(batch(strategy.share, step), rates(step))
            save(checkpoints, 2, strategy.state(), {}, attempt=0, **place)  # type: ignore[arg-type]
        found.append(values(strategy.state()))
        strategy.step(batch(strategy.share, 2), rates(2))
        found[-1] |= {f"then {name}": value for name, value in values(strategy.state()).items()}
        strategy.close()
    return found


def test_a_checkpoint_with_fused_projections_and_extra_state_is_the_uncut_models(tmp_path: Path) -> None:
    for written, *read in run_ranks(4, go_on, tmp_path, limit_s=120):
        assert written["model/5._extra_state"] == {"calls": 2}
        assert written["then model/5._extra_state"] == {"calls": 3}
        assert written["model/1.qkv.weight"].shape == (3 * WIDTH, WIDTH)
        for state in read:
            for name, value in state.items():
                if isinstance(value, Tensor):
                    exact = 1e-6 if name.startswith("then") else 0
                    torch.testing.assert_close(value, written[name], atol=exact, rtol=0, msg=name)
                else:
                    assert value == written[name], name


class Branches(nn.Module):
    """Takes another way when told so."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.always, self.sometimes = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.body(inputs)
        outputs = self.always(hidden)
        return outputs + self.sometimes(hidden) if inputs[0, 0] > 0 else outputs


def leave_out(session: Session, accumulate: int) -> str:
    strategy = build_strategy(StrategyConfig("ddp"), session, TrainConfig(accumulate=accumulate))
    inputs, targets = torch.ones(4, WIDTH), torch.tensor([0, 1, 2, 3])

    def share(signs: list[int]) -> Batch:
        rows = slice(*strategy.share.bounds(4))
        return Batch(((inputs * torch.tensor(signs)[:, None])[rows], targets[rows]), torch.arange(4)[rows], 4)

    strategy.build(
        Branches,
        lambda m: torch.optim.SGD(m.parameters(), 0.1),
        criterion_objective(cross_entropy),
        share([1, 1, 1, 1]),
    )
    if accumulate > 1:
        strategy.step(share([1, -1, 1, -1]), 0.1)
    return refused_with(lambda: strategy.step(share([-1] * 4), 0.1))


@pytest.mark.parametrize(
    ("accumulate", "words"),
    [(1, "the loss does not depend on sometimes.weight, sometimes.bias; freeze"), (2, "used in an early part of the")],
)
def test_a_branch_that_a_step_does_without_is_refused_in_that_step_by_name(accumulate: int, words: str) -> None:
    assert all(words in message for message in run_ranks(2, leave_out, accumulate))


@pytest.mark.soak
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_model_trains_as_on_one_process_or_is_refused(strategy: str) -> None:
    hold_to_it([pair for pair in TABLE if pair[1] == strategy], limit_s=300)
