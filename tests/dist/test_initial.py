"""A run that starts from another's weights, on real ranks."""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.dist.objectives import cross_entropy
from tests.dist.ranks import in_run, run_ranks
from tests.dist.strategy_cases import (
    CLASSES,
    EXACT,
    FEATURES,
    OPTIMIZERS,
    STEPS,
    SUBJECTS,
    built,
    global_batch,
    part,
    snapshot,
)
from tests.dist.test_trainer import BATCH, CONFIG, SAMPLES, assert_same, images, noisy_model, train
from toolkit.config import ModelConfig, StrategyConfig
from toolkit.data.loader import Loader
from toolkit.ranks.session import Session
from toolkit.strategies import build_strategy, criterion_objective
from toolkit.train import initial as weights
from toolkit.train.initial import initialised

pytestmark = pytest.mark.dist

Weights = dict[str, Tensor]


def train_from(session: Session, run_dir: Path, source: str, epochs: int) -> tuple[Weights, Weights]:
    """The model as it was before the first step, and after the last one."""
    here, seen = in_run(session, run_dir), list[Any]()

    def model() -> Any:
        torch.manual_seed(session.rank)  # what is not from the source would differ between ranks
        seen.append(initialised(noisy_model, ModelConfig(init_from=source), here))
        seen.append({f"model/{name}": value.clone() for name, value in seen[0].state_dict().items()})
        return seen[0]

    _, after = train(session, run_dir, replace(CONFIG, epochs=epochs), model)
    return seen[1], {name: value for name, value in after.items() if name.startswith("model/")}


def test_all_ranks_start_from_the_other_runs_weights_and_a_resume_does_not_need_them(tmp_path: Path) -> None:
    source, run_dir, whole = tmp_path / "source", tmp_path / "run", tmp_path / "whole"
    first = run_ranks(2, partial(train, model=noisy_model), source)[0][1]
    (source / "config.yaml").write_text("")
    trained = {name: value for name, value in first.items() if name.startswith("model/")}
    undisturbed = run_ranks(2, train_from, whole, str(source), 4)
    for before, after in run_ranks(2, train_from, run_dir, str(source), 2):
        assert_same(before, trained)
        assert not torch.equal(after["model/1.weight"], trained["model/1.weight"])
    shutil.rmtree(source)
    for (_, after), (_, expected) in zip(run_ranks(2, train_from, run_dir, str(source), 4), undisturbed, strict=True):
        assert_same(after, expected)


def start_sharded(session: Session, source: str) -> tuple[int, Weights]:
    """How often this rank read the source, and what it started from."""
    reads, plain_read = list[Any](), weights.read_weights
    weights.read_weights = lambda *found: reads.append(found) or plain_read(*found)
    strategy = build_strategy(StrategyConfig("fsdp"), session)
    loader = Loader(images(SAMPLES, 1), global_batch_size=BATCH, seed=0, share=strategy.share)
    model = partial(initialised, noisy_model, ModelConfig(init_from=source), session)
    strategy.build(
        model, lambda made: torch.optim.SGD(made.parameters()), criterion_objective(cross_entropy), loader.at(0)
    )
    return len(reads), snapshot(strategy)


def test_sharded_ranks_start_from_the_other_runs_weights_which_rank_0_alone_reads(tmp_path: Path) -> None:
    trained = run_ranks(2, partial(train, model=noisy_model), tmp_path)[0][1]
    (tmp_path / "config.yaml").write_text("")
    ranks = run_ranks(3, start_sharded, str(tmp_path))
    assert [reads for reads, _ in ranks] == [1, 0, 0]
    for _, first in ranks:
        assert_same(first, {name: trained[name] for name in first})


def backbone_and_head() -> nn.Sequential:
    torch.manual_seed(0)
    body = nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh()
    head = nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES)
    return nn.Sequential(*body, *head)  # enough layers to train for three stages of a pipeline


def train_frozen(session: Session, name: str) -> tuple[list[float], Weights]:
    model = partial(initialised, backbone_and_head, ModelConfig(freeze=["0.*", "1.*"]), session)
    strategy = built(name, session, model)
    losses = [strategy.step(part(strategy.share, step), 0.1).loss.item() for step in range(STEPS)]
    return losses, snapshot(strategy)


@pytest.mark.parametrize(
    "name", ["ddp", "fsdp", "zero", "tensor", "pipeline", "parameter_server", "local_sgd", "powersgd"]
)
def test_frozen_parts_stay_and_the_others_train_as_on_one_process(name: str) -> None:
    model = backbone_and_head()  # trained on this process, as the oracle
    fresh = {key: value.clone() for key, value in model.state_dict().items()}
    model[:2].requires_grad_(False).eval()
    optimizer = OPTIMIZERS["sgd"](model)
    losses = []
    for step in range(STEPS):
        inputs, targets = global_batch(step)
        loss = functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    ranks = run_ranks(SUBJECTS[name][1], train_frozen, name)
    if name in EXACT:
        assert np.allclose(np.sum([rank[0] for rank in ranks], axis=0), losses, atol=1e-6)
    for _, after in ranks:
        for key, value in model.state_dict().items():
            found = after[f"model/{key}"]
            if key.startswith(("0.", "1.")):
                assert torch.equal(found, fresh[key]), key
            elif name in EXACT:
                torch.testing.assert_close(found, value, atol=1e-6, rtol=0, msg=key)
            else:
                assert not torch.equal(found, fresh[key]), key
