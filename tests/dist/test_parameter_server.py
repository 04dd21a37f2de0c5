"""Risks of a parameter server: cut weights, tickets out of order."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.dist.objectives import cross_entropy
from tests.dist.ranks import in_run, run_ranks
from tests.dist.strategy_cases import OPTIMIZERS, STEPS, oracle, part, plain_model, rates, token_loss
from tests.dist.test_trainer import BATCH, EVERY_4, SAMPLES, images, judge, noisy_model
from tests.unit.checkpoint.ranks import tensor_of
from toolkit.base.errors import ConfigError
from toolkit.config import JobConfig, OptimConfig, StrategyConfig, TrainConfig
from toolkit.config.learning_rate import build_schedule
from toolkit.config.strategy import ParameterServerConfig
from toolkit.data.loader import Loader
from toolkit.data.randomness import seed_for_init
from toolkit.ranks.session import Session
from toolkit.strategies import build_strategy, criterion_objective
from toolkit.train.loop import Result, Trainer
from toolkit.train.optim import build_optimizer
from toolkit.train.run_checkpoints import Checkpoints
from toolkit.train.saver import identity

pytestmark = [pytest.mark.dist, pytest.mark.sample(4)]


def config(servers: int = 1, mode: str = "sync", staleness: int = 4) -> StrategyConfig:
    return StrategyConfig("parameter_server", parameter_server=ParameterServerConfig(servers, mode, staleness))


class Scaled(nn.Module):
    """A parameter without a dimension, one that is frozen, two names for one weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner = plain_model()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.alias = self.inner.get_submodule("0")

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs) * self.scale + self.frozen


def scaled_oracle() -> dict[str, Tensor]:
    model = Scaled()
    stepper = OPTIMIZERS["adamw"](model)
    for step in range(STEPS):
        batch = part(whole_share(), step)
        for group in stepper.param_groups:
            group["lr"] = rates(step)
        stepper.zero_grad()
        (cross_entropy(model(batch.inputs), batch.targets)[0] / len(batch)).backward()
        stepper.step()
    return model.state_dict()


def whole_share() -> Any:
    from toolkit.ranks.batch import Share

    return Share(0, 1)


def on_two_servers(session: Session, scaled: bool) -> tuple[list[float], dict[str, tuple[Any, Tensor]]]:
    strategy = build_strategy(config(servers=2), session, TrainConfig(accumulate=2))
    model, criterion = (Scaled, cross_entropy) if scaled else (plain_model, token_loss)
    strategy.build(model, OPTIMIZERS["adamw"], criterion_objective(criterion), part(strategy.share, 0))
    losses = [strategy.step(part(strategy.share, n), rates(n)).loss.item() for n in range(STEPS)]
    state = strategy.state()
    return losses, {name: (getattr(entry, "offsets", None), tensor_of(entry).clone()) for name, entry in state.items()}


@pytest.mark.parametrize("scaled", [False, True], ids=["weighted loss", "odd parameters"])
def test_two_servers_take_the_steps_of_one_process_and_keep_half_of_it_each(scaled: bool) -> None:
    ranks = run_ranks(4, on_two_servers, scaled)
    losses, weights = oracle("adamw", token_loss, 10) if not scaled else ([], scaled_oracle())
    if losses:
        assert np.allclose(np.sum([rank[0] for rank in ranks], axis=0), losses, atol=1e-6)
    sizes = [0, 0]
    for name, expected in weights.items():
        (offsets, first), (_, second), *others = (state[f"model/{name}"] for _, state in ranks)
        whole = first if offsets is None else torch.cat([first, second])
        torch.testing.assert_close(whole, expected, atol=2e-6, rtol=0, msg=name)
        assert all(value.numel() == 0 for at, value in others if at is not None)
        if offsets is not None and not name.startswith("alias"):
            sizes = [sizes[0] + first.numel(), sizes[1] + second.numel()]
    assert abs(sizes[0] - sizes[1]) <= 16  # a row of the widest weight
    steps = {state[name][1].item() for _, state in ranks for name in state if name.endswith("/step")}
    assert steps == {float(STEPS)}


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters())


def refused(session: Session) -> list[str]:
    strategy = build_strategy(config(), session)
    with pytest.raises(ConfigError) as uncut:
        strategy.build(plain_model, adafactor, criterion_objective(cross_entropy), part(strategy.share, 0))
    with pytest.raises(ConfigError) as many:
        build_strategy(config(3), session)
    return [str(uncut.value), str(many.value)]


def test_uncuttable_optimizers_and_too_many_servers_are_refused_on_every_rank() -> None:
    for uncut, many in run_ranks(3, refused):
        assert uncut.startswith("optim.name: optim/0.weight/")
        assert many.startswith("strategy.parameter_server.servers: 3 of 3 ranks leave no worker")


CONFIG = TrainConfig(epochs=4, seed=3, log_every=1, eval_every="epoch")  # 10 steps, evaluations in 3, 5, 8 and 10


def train(
    session: Session, run_dir: Path, section: StrategyConfig, model: Any = noisy_model, train: TrainConfig = CONFIG
) -> tuple[Result, dict[str, Tensor]]:
    session = in_run(session, run_dir)
    seed_for_init(train.seed)
    strategy = build_strategy(section, session, train)
    loader = Loader(images(SAMPLES, 1), global_batch_size=BATCH, seed=train.seed, share=strategy.share)
    optim = OptimConfig("adamw", lr=0.01)
    with closing(strategy):
        strategy.build(model, partial(build_optimizer, optim), criterion_objective(cross_entropy), loader.at(0))
        checkpoints = Checkpoints(EVERY_4, session, strategy, identity(JobConfig(strategy=section)))
        schedule = partial(build_schedule, optim)
        trainer = Trainer(train, session, strategy, loader, schedule=schedule, checkpoints=checkpoints)
        result = trainer.fit(judge)
        return result, {name: entry.value.clone() for name, entry in strategy.state().items()}  # type: ignore[union-attr]


def logged(run_dir: Path, tag: str) -> dict[int, Any]:
    lines = [json.loads(line) for line in (run_dir / "tensorboard" / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[tag] for line in lines if tag in line}


@pytest.mark.parametrize("turn", [("ddp", "parameter_server"), ("parameter_server", "ddp")])
def test_ddp_and_a_parameter_server_go_on_from_each_others_checkpoints(tmp_path: Path, turn: tuple[str, str]) -> None:
    from tests.dist.test_trainer import plain_model as plain

    _, state = run_ranks(1, train, tmp_path / "whole", StrategyConfig(), plain)[0]
    sections = [StrategyConfig() if name == "ddp" else config() for name in turn]
    run_ranks(3, train, tmp_path / "parts", sections[0], plain, replace(CONFIG, max_steps=4))
    _, again = run_ranks(3, train, tmp_path / "parts", sections[1], plain)[0]
    for name, value in state.items():
        torch.testing.assert_close(again[name], value, atol=1e-5, rtol=0, msg=name)


def run_ahead(session: Session, section: StrategyConfig, until: int) -> list[int]:
    """Return by how many tickets worker 2 was ahead at each of its beginnings.

    Worker 1 waits for ticket ``until`` of worker 2. It counts each ticket first: servers know of no uncounted one."""
    strategy = build_strategy(section, session)
    strategy.build(plain_model, OPTIMIZERS["sgd"], criterion_objective(cross_entropy), part(strategy.share, 0))
    leads = []
    for n in range(2 * until):
        if session.rank == 1:
            session.store.wait([f"begun/{until}"])
            session.store.add("done", 1)
        if session.rank == 2:
            leads.append(n - session.store.add("done", 0))
            session.store.set(f"begun/{n}", "")
        strategy.step(part(strategy.share, n), 0.01)
    return leads


def test_a_bounded_worker_is_never_more_tickets_ahead_of_the_slowest_than_it_may() -> None:
    leads = run_ranks(3, run_ahead, config(mode="bounded", staleness=2), 2)[2]
    assert leads[:3] == [0, 1, 2]
    assert max(leads) <= 2


def test_an_asynchronous_worker_waits_for_nobody() -> None:
    assert run_ranks(3, run_ahead, config(mode="async"), 6)[2][:7] == [0, 1, 2, 3, 4, 5, 6]


def async_alone(session: Session, optimizer: str, criterion: Any) -> dict[str, Tensor]:
    strategy = build_strategy(config(mode="async"), session)
    strategy.build(plain_model, OPTIMIZERS[optimizer], criterion_objective(criterion), part(strategy.share, 0))
    for n in range(STEPS):
        strategy.step(part(strategy.share, n), rates(n))
    return {name: entry.value.clone() for name, entry in strategy.state().items()}  # type: ignore[union-attr]


@pytest.mark.parametrize(("optimizer", "criterion"), [("sgd", cross_entropy), ("adamw", token_loss)])
def test_an_asynchronous_run_of_one_worker_takes_the_steps_of_one_process(optimizer: str, criterion: Any) -> None:
    """So the steps have the length that docs/slow-links.md promises, with a weighted loss as well."""
    state = run_ranks(2, async_alone, optimizer, criterion)[0]
    for name, value in oracle(optimizer, criterion, 10)[1].items():
        torch.testing.assert_close(state[f"model/{name}"], value, atol=1e-6, rtol=0, msg=name)


@pytest.mark.parametrize("mode", ["async", "bounded"])
def test_asynchronous_training_learns_and_loses_no_ticket_to_a_resume(tmp_path: Path, mode: str) -> None:
    """Digits are classified as well as with ddp. Each ticket of each step is applied once, by any worker."""
    section = config(mode=mode, staleness=3)
    first = run_ranks(4, learn, tmp_path, section, 60, limit_s=120)
    assert first[0].metrics["eval/accuracy"] > 0.85
    result = run_ranks(4, learn, tmp_path, section, 150, limit_s=120)[0]
    assert result.metrics["eval/accuracy"] > 0.93
    counts = logged(tmp_path, "staleness/tickets")
    assert sum(sum(each.values()) for each in counts.values()) == 150 * 3
    assert max(int(number) for each in counts.values() for number in each) > 0


def learn(session: Session, run_dir: Path, section: StrategyConfig, steps: int) -> Result:
    from jobs.models import build_model
    from tests.dist.objectives import classification
    from toolkit.config import DataConfig
    from toolkit.data.datasets import build_datasets
    from toolkit.data.loader import build_loader, eval_batches
    from toolkit.strategies import Strategy
    from toolkit.train.evaluate import evaluate

    session = in_run(session, run_dir)
    seed_for_init(0)
    data = build_datasets(DataConfig())
    section_of_train = TrainConfig(max_steps=steps, log_every=10, eval_every=75)
    strategy = build_strategy(section, session, section_of_train)
    loader = build_loader(data.train, DataConfig(), strategy.share, seed=0)
    optim = OptimConfig(lr=0.1)
    with closing(strategy):
        model = partial(build_model, "mlp", data.classes, data.sample_shape)
        strategy.build(model, partial(build_optimizer, optim), criterion_objective(cross_entropy), loader.at(0))
        checkpoints = Checkpoints(EVERY_4, session, strategy, identity(JobConfig(strategy=section)))
        schedule = partial(build_schedule, optim)
        trainer = Trainer(section_of_train, session, strategy, loader, schedule=schedule, checkpoints=checkpoints)

        def judge(strategy: Strategy, is_interrupted: Callable[[], bool]) -> dict[str, float] | None:
            batches = eval_batches(data.eval, strategy.share, batch_size=256)
            return evaluate(strategy, batches, len(data.eval), classification, is_interrupted)

        return trainer.fit(judge)
