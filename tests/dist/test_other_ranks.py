"""A run that continues with another number of ranks.

It ends within an epoch on 4 ranks, and again on 2, and continues with 3 as if it had been undisturbed.
"""

import json
import multiprocessing
import random
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.dist.objectives import cross_entropy
from tests.dist.ranks import in_run, run_ranks, stop_all
from toolkit.base.errors import StoppedError
from toolkit.checkpoint.folder import newest_step
from toolkit.config import CheckpointConfig, JobConfig, OptimConfig, StrategyConfig, TrainConfig
from toolkit.config.learning_rate import build_schedule
from toolkit.data.loader import Loader
from toolkit.data.randomness import seed_for_init
from toolkit.ranks.batch import Batch
from toolkit.ranks.session import Session
from toolkit.strategies import Strategy, build_strategy, criterion_objective
from toolkit.train.loop import Trainer
from toolkit.train.optim import build_optimizer
from toolkit.train.run_checkpoints import Checkpoints
from toolkit.train.saver import identity

pytestmark = [pytest.mark.dist, pytest.mark.chaos, pytest.mark.sample(2)]

SAMPLES, BATCH, EPOCHS = 50, 13, 4  # 13 divides neither the samples nor 4, 2 or 3 ranks
STEPS = 16

#: One step of one rank: for each sample its position, which one it is, and the bytes that the model got.
Seen = dict[int, list[tuple[int, int, bytes]]]


class Pictures:
    """A sample's target is its own number; its augmentation draws from all three generators."""

    def __init__(self, bad: Collection[int] = ()) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index in self.bad:
            raise OSError(f"{index} is torn")
        return torch.rand(6) + random.random() + np.random.normal() + index, index


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.Linear(16, SAMPLES))


def no_judgement(strategy: Strategy, is_interrupted: Callable[[], bool]) -> dict[str, float]:
    return {}


def watch(loader: Loader, seen: Seen, last: Callable[[int], None]) -> None:
    """Write down every batch from now on; ``last`` is asked before each."""
    plain_at = loader.at

    def at(step: int) -> Batch | None:
        last(step)
        batch = plain_at(step)
        rows = zip(batch.positions.tolist(), batch.targets.tolist(), batch.inputs, strict=True)
        seen[step] = [(position, target, row.numpy().tobytes()) for position, target, row in rows]
        return batch

    loader.at = at


def train(
    session: Session,
    run_dir: Path,
    attempt: int,
    end: str | None = None,
    in_step: int = 0,
    bad: Collection[int] = (),
    most: int | None = None,
) -> Seen:
    """One attempt; what its steps saw. With ``end`` it ends in step ``in_step``, by a stop or with nothing saved."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # has a worker
    session = in_run(session, run_dir, attempt)
    config = TrainConfig(epochs=EPOCHS, seed=3, log_every=5)
    seed_for_init(config.seed)
    strategy = build_strategy(StrategyConfig(), session)
    pictures, share = Pictures(bad), strategy.share
    loader = Loader(pictures, global_batch_size=BATCH, seed=3, share=share, workers=1, max_bad_samples=most)
    optim = OptimConfig("sgd", lr=0.001)
    strategy.build(model, partial(build_optimizer, optim), criterion_objective(cross_entropy), loader.at(0))
    seen: Seen = {}

    def strike(step: int) -> None:
        if step == in_step and end == "dies":
            raise OSError("the disk is gone")
        if step == in_step and end == "is stopped":
            stop_all(session.gate)

    watch(loader, seen, strike)
    checkpoints = Checkpoints(CheckpointConfig(4), session, strategy, identity(JobConfig()))
    schedule = partial(build_schedule, optim)
    trainer = Trainer(config, session, strategy, loader, schedule=schedule, checkpoints=checkpoints)
    try:
        trainer.fit(no_judgement)
    except (OSError, StoppedError):
        if end is None:
            raise
    loader.close()
    return seen


def together(ranks: list[Seen]) -> dict[int, list[Any]]:
    """Return the global batches of an attempt, by step. All ranks must have made the same steps."""
    (steps,) = {tuple(seen) for seen in ranks}
    return {step: sorted(row for seen in ranks for row in seen[step]) for step in steps}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Any]]:
    return together(run_ranks(4, train, tmp_path_factory.mktemp("whole"), 1))


def go_through(run_dir: Path, end: str, *more: Any) -> tuple[list[int], dict[int, list[Any]]]:
    """Make three attempts of 4, 2 and 3 ranks. Return their first steps, and the batches of the steps that count."""
    counts: dict[int, list[Any]] = {}
    starts = []
    for attempt, (ranks, how, in_step) in enumerate([(4, end, 6), (2, "dies", 11), (3, None, 0)], 1):
        seen = together(run_ranks(ranks, train, run_dir, attempt, how, in_step, *more))
        starts.append(min(seen))
        counts = {step: counts[step] for step in range(min(seen))} | seen  # what was not saved was done in vain
    return starts, counts


@pytest.mark.parametrize("end", ["dies", "is stopped"])
def test_a_run_of_4_ranks_that_ends_within_an_epoch_goes_on_with_2_and_then_3(
    undisturbed: dict[int, list[Any]], tmp_path: Path, end: str
) -> None:
    starts, counts = go_through(tmp_path, end)
    assert all(start * BATCH % SAMPLES for start in starts[1:]), "within an epoch"
    assert starts[0] == 0 < starts[1] < starts[2]
    assert newest_step(tmp_path / "checkpoints") == STEPS

    order = [sample for step in range(STEPS) for _, sample, _ in counts[step]]
    for epoch in range(EPOCHS):
        assert sorted(order[epoch * SAMPLES : (epoch + 1) * SAMPLES]) == list(range(SAMPLES))
    assert [row[0] for step in range(STEPS) for row in counts[step]] == list(range(STEPS * BATCH))
    assert {step: [row[1] for row in batch] for step, batch in counts.items()} == {
        step: [row[1] for row in batch] for step, batch in undisturbed.items()
    }
    assert counts == undisturbed, "an augmentation differs"


def bad_samples(run_dir: Path) -> tuple[list[tuple[int, int]], dict[int, float]]:
    """(index, position) of each as listed, and the curve."""
    lines = [json.loads(line) for line in (run_dir / "bad_samples.jsonl").read_text().splitlines()]
    logged = [json.loads(line) for line in (run_dir / "tensorboard/metrics.jsonl").read_text().splitlines()]
    curve = {line["step"]: line["data/bad_samples"] for line in logged if "data/bad_samples" in line}
    return [(line["index"], line["position"]) for line in lines], curve


def test_bad_samples_are_replaced_and_listed_alike_for_any_ranks_and_attempts(
    undisturbed: dict[int, list[Any]], tmp_path: Path
) -> None:
    bad = {3, 11, 12, 20, 44}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    expected = together(run_ranks(3, train, whole, 1, None, 0, bad, len(bad)))
    _, counts = go_through(parts, "dies", bad, len(bad))
    assert counts == expected
    good = {row for batch in undisturbed.values() for row in batch if row[1] not in bad}
    seen = {row for batch in counts.values() for row in batch}
    assert good < seen, "a good sample is not as it was"
    assert bad.isdisjoint(row[1] for row in seen)
    listed, curve = bad_samples(whole)
    assert sorted(index for index, _ in listed) == sorted(bad)
    assert bad_samples(parts) == (listed, curve)
    assert list(curve) == [5, 10, 15, 16]
    assert curve[16] == len(bad)
