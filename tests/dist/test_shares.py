"""Shares that follow the ranks' speed, and parts that never change, on real ranks."""

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dist.objectives import cross_entropy
from tests.dist.ranks import in_run, run_ranks
from toolkit.config import CheckpointConfig, DataConfig, JobConfig, OptimConfig, StrategyConfig, TrainConfig
from toolkit.config.learning_rate import build_schedule
from toolkit.data.loader import build_loader
from toolkit.data.randomness import seed_for_init
from toolkit.ranks.batch import Batch
from toolkit.ranks.session import Session
from toolkit.strategies import Strategy, build_strategy, criterion_objective
from toolkit.train.loop import Trainer
from toolkit.train.optim import build_optimizer
from toolkit.train.run_checkpoints import Checkpoints
from toolkit.train.saver import identity

pytestmark = [pytest.mark.dist, pytest.mark.sample(3)]

SAMPLES, BATCH = 70, 30
AUTO = DataConfig(global_batch_size=BATCH, balance="auto")
#: A rank that takes twice as long for a sample as its peers.
SECONDS = (0.01, 0.02, 0.01)
#: Where three such ranks end: 12, 6 and 12 samples.
SETTLED = [12, 6, 12]


class Images:
    """Noise, of which a sample takes ``seconds`` to load."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(self._seconds)
        return torch.randn(6, generator=torch.Generator().manual_seed(index)) + 0.1 * torch.rand(6), index % 5


class TimedBySamples:
    """A stopwatch in a world where nothing but samples takes time."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.count = seconds, 0

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def take(self) -> float:
        return self.seconds * self.count


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5))


def nothing(strategy: Strategy, is_interrupted: Callable[[], bool]) -> dict[str, float]:
    return {}


def train(
    session: Session, run_dir: Path, steps: int, data: DataConfig = AUTO, seconds: Any = SECONDS, dataset: Any = Images
) -> tuple[list[int], dict[str, Tensor], list[list[int]]]:
    """Return this rank's sample counts by step, its final state, and its samples."""
    session = in_run(session, run_dir)
    config = TrainConfig(epochs=100, max_steps=steps, seed=3, log_every=2, accumulate=2)
    seed_for_init(config.seed)
    strategy: Any = build_strategy(StrategyConfig(), session, config)
    loader = build_loader(dataset(), data, strategy.share, seed=3)
    optim = OptimConfig("adamw", lr=0.01)
    strategy.build(model, partial(build_optimizer, optim), criterion_objective(cross_entropy), loader.at(0))
    # Own times made of the samples alone let the test know how shares must move.
    clock = TimedBySamples(seconds[session.rank]) if seconds else None
    strategy.local_stopwatch = clock or strategy.local_stopwatch
    counts, seen, plain_at = list[int](), list[list[int]](), loader.at

    def at(step: int) -> Batch | None:
        batch = plain_at(step)
        counts.append(len(batch))
        seen.append(loader.sample_indices(step))
        if clock is not None:
            clock.count = len(batch)
        return batch

    loader.at = at
    job = JobConfig(data=data)
    checkpoints = Checkpoints(CheckpointConfig(6), session, strategy, identity(job))
    schedule = partial(build_schedule, optim)
    trainer = Trainer(config, session, strategy, loader, schedule=schedule, checkpoints=checkpoints)
    trainer.fit(nothing)
    state = {name: entry.value.clone() for name, entry in strategy.state().items()}
    return counts, state, seen


def curve(run_dir: Path, tag: str) -> dict[int, float]:
    lines = [json.loads(line) for line in (run_dir / "tensorboard/metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[tag] for line in lines if tag in line}


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    run_dir = tmp_path_factory.mktemp("moved")
    return run_dir, run_ranks(3, train, run_dir, 12)


def test_the_slow_rank_gets_fewer_samples_and_the_run_is_that_of_one_process(moved: Any, tmp_path: Path) -> None:
    run_dir, ranks = moved
    counts = list(zip(*(rank[0] for rank in ranks), strict=True))
    assert counts[0] == (10, 10, 10)
    assert [*counts[-1]] == SETTLED
    assert curve(run_dir, "world_share/rank_1")[12] == 6
    ((_, alone, seen),) = run_ranks(1, train, tmp_path, 12, DataConfig(global_batch_size=BATCH), None)
    for step, whole in enumerate(seen):
        assert [sample for rank in ranks for sample in rank[2][step]] == whole, "another global batch"
    for _, state, _ in ranks:
        for name, value in alone.items():
            torch.testing.assert_close(state[name], value, atol=2e-6, rtol=0)
    assert curve(run_dir, "train/loss") == pytest.approx(curve(tmp_path, "train/loss"), abs=1e-6)


def test_a_resume_keeps_the_saved_shares_and_another_number_of_ranks_has_even_ones(moved: Any, tmp_path: Path) -> None:
    run_ranks(3, train, tmp_path, 6)
    for (counts, state, _), (_, expected, _) in zip(run_ranks(3, train, tmp_path, 12), moved[1], strict=True):
        assert counts[0] == counts[-1], "the shares of the checkpoint"
        assert [name for name in expected if not torch.equal(state[name], expected[name])] == []
    assert [rank[0][0] for rank in run_ranks(2, train, tmp_path, 14)] == [15, 15]


def slow_in_fact(session: Session, run_dir: Path) -> list[int]:
    dataset = partial(Images, 0.004 if session.rank == 1 else 0.0)
    return train(session, run_dir, 14, AUTO, None, dataset)[0]


def test_a_rank_whose_data_are_slow_is_measured_and_gets_the_least_share(tmp_path: Path) -> None:
    zero, one = run_ranks(2, slow_in_fact, tmp_path)
    assert (zero[0], one[0]) == (15, 15)
    assert one[-1] < 15 < zero[-1]  # by how much follows from the machine's load: with other clocks it is exact above


@pytest.mark.parametrize("split", ["blocks", "hash"])
def test_each_rank_reads_its_own_part_and_a_resume_is_bit_for_bit(split: str, tmp_path: Path) -> None:
    data = DataConfig(global_batch_size=BATCH, partition=split)
    undisturbed = run_ranks(3, train, tmp_path / "whole", 12, data, None)
    parts = [{sample for step in rank[2] for sample in step} for rank in undisturbed]
    assert sorted(sample for part in parts for sample in part) == list(range(SAMPLES)), "parts meet, or miss a sample"
    run_ranks(3, train, tmp_path / "cut", 6, data, None)
    again = run_ranks(3, train, tmp_path / "cut", 12, data, None)
    for (_, state, seen), (_, expected, whole) in zip(again, undisturbed, strict=True):
        assert seen == whole[6:]
        assert [name for name in expected if not torch.equal(state[name], expected[name])] == []
    with pytest.raises(AssertionError, match=r"(?s)cannot be continued on 2 ranks: each of 3 ranks had read"):
        run_ranks(2, train, tmp_path / "cut", 14, data, None)
    with pytest.raises(AssertionError, match=r"data\.partition was"):
        run_ranks(3, train, tmp_path / "cut", 14, AUTO, None)
