"""A killed training on streams ends like the undisturbed one.

Another number of ranks is refused.
"""

import multiprocessing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dist.objectives import cross_entropy
from tests.dist.ranks import in_run, refused_with, run_ranks
from tests.unit.data.streams import YieldedLines
from toolkit.checkpoint.folder import newest_step
from toolkit.config import CheckpointConfig, JobConfig, OptimConfig, StrategyConfig, TrainConfig
from toolkit.config.learning_rate import build_schedule
from toolkit.data.randomness import seed_for_init
from toolkit.plugins.formats.streams import StreamLoader
from toolkit.ranks.session import Session
from toolkit.strategies import build_strategy, criterion_objective
from toolkit.train.loop import Result, Trainer
from toolkit.train.optim import build_optimizer
from toolkit.train.run_checkpoints import Checkpoints
from toolkit.train.saver import identity

pytestmark = pytest.mark.dist

CONFIG = TrainConfig(epochs=5, seed=3, log_every=1)  # 12 steps


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 300))


def train(session: Session, run_dir: Path, dies_in: int | None = None) -> tuple[Result | None, Any, list[list[int]]]:
    """The result, the weights, and the samples of each step of this attempt."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # has a worker
    session = in_run(session, run_dir)
    seed_for_init(CONFIG.seed)
    strategy = build_strategy(StrategyConfig(), session)
    loader = StreamLoader(
        YieldedLines, dataset_size=24, global_batch_size=10, seed=3, share=strategy.share, workers=session.rank % 2
    )
    optim = OptimConfig("adamw", lr=0.01)
    strategy.build(model, partial(build_optimizer, optim), criterion_objective(cross_entropy), loader.at(0))
    plain_at, targets = loader.at, list[list[int]]()

    def at(step: int) -> Any:
        if step == dies_in:
            raise OSError("the disk is gone")
        batch = plain_at(step)
        targets.append(batch.targets.tolist())
        return batch

    loader.at = at
    checkpoints = Checkpoints(CheckpointConfig(4), session, strategy, identity(JobConfig()))
    schedule = partial(build_schedule, optim)
    trainer = Trainer(CONFIG, session, strategy, loader, schedule=schedule, checkpoints=checkpoints)
    result = None
    try:
        result = trainer.fit(lambda strategy, is_interrupted: {})
    except OSError:
        assert dies_in is not None
    finally:
        loader.close()
    return result, weights(strategy.state()), targets


def weights(state: Any) -> dict[str, Tensor]:
    return {name: entry.value.clone() for name, entry in state.items()}


def test_a_training_on_streams_killed_between_checkpoints_ends_with_the_same_bits(
    tmp_path: Path,
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    undisturbed = run_ranks(3, train, whole)
    killed = run_ranks(3, train, parts, 7)
    saved = newest_step(parts / "checkpoints")
    assert saved == 4
    resumed = run_ranks(3, train, parts)
    for (result, state, targets), (_, _, before), (ended, end, after) in zip(undisturbed, killed, resumed, strict=True):
        assert result == ended
        assert result.step == 12
        assert before == targets[:7]
        assert after == targets[4:], "a sample is lost or comes twice"
        assert [name for name in state if not torch.equal(state[name], end[name])] == []
    samples = [{sample for batch in targets for sample in batch} for _, _, targets in undisturbed]
    assert [len(found) for found in samples] == [7, 8, 9]  # of uneven streams, all were seen


def refused(session: Session, run_dir: Path) -> str:
    return refused_with(lambda: train(session, run_dir))


def test_a_training_on_streams_cannot_go_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    run_ranks(3, train, tmp_path, 5)
    for message in run_ranks(2, refused, tmp_path):
        assert "step-00000004 cannot be continued on 2 ranks: each of 3 ranks had read its own stream" in message
        assert "Continue with 3 ranks" in message
