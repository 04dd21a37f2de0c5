"""The whole loop on real ranks: resume, evaluation, what is logged, what is refused."""

import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.dist.objectives import classification, cross_entropy
from tests.dist.ranks import in_run, refused_with, run_ranks, stop_all
from tests.dist.strategy_cases import SUBJECTS
from tests.waiting import wait_for
from toolkit.base.errors import StoppedError
from toolkit.checkpoint.folder import CheckpointFolder, newest_step
from toolkit.config import CheckpointConfig, JobConfig, OptimConfig, StrategyConfig, TrainConfig
from toolkit.config.learning_rate import build_schedule
from toolkit.data.datasets import InMemory
from toolkit.data.loader import Loader, eval_batches
from toolkit.data.randomness import seed_for_init
from toolkit.ranks.agreement import STOP
from toolkit.ranks.session import Session
from toolkit.strategies import Strategy, build_strategy, criterion_objective
from toolkit.train.evaluate import Hooks, evaluate
from toolkit.train.loop import Result, Trainer
from toolkit.train.optim import build_optimizer
from toolkit.train.run_checkpoints import Checkpoints
from toolkit.train.saver import identity

pytestmark = [pytest.mark.dist, pytest.mark.sample(6)]

SAMPLES, BATCH, EVAL_SAMPLES = 50, 20, 37
EVERY_4 = CheckpointConfig(4)
ADAMW = OptimConfig("adamw", lr=0.01)
CONFIG = TrainConfig(epochs=4, seed=3, log_every=1, eval_every="epoch")  # 10 steps, an epoch ends in step 3, 5, 8, 10


def images(count: int, seed: int) -> InMemory:
    draw = torch.Generator().manual_seed(seed)
    return InMemory(torch.randn(count, 1, 4, 4, generator=draw), torch.randint(5, (count,), generator=draw))


def plain_model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 5))


def noisy_model() -> nn.Module:
    """Dropout draws random numbers, BatchNorm keeps buffers that differ between ranks."""
    layers = nn.Linear(16, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.3), nn.Linear(24, 5)
    return nn.Sequential(nn.Flatten(), *layers)


def judge(strategy: Strategy, is_interrupted: Callable[[], bool]) -> dict[str, float] | None:
    test_set = images(EVAL_SAMPLES, 2)
    return evaluate(strategy, eval_batches(test_set, strategy.share, 8), EVAL_SAMPLES, classification, is_interrupted)


def train(
    session: Session,
    run_dir: Path,
    config: TrainConfig = CONFIG,
    model: Any = noisy_model,
    checkpoint: CheckpointConfig = EVERY_4,
    job: JobConfig | None = None,
    judge: Any = judge,
    name: str | StrategyConfig = "ddp",
    optim: OptimConfig = ADAMW,
    hooks: Hooks | None = None,
) -> tuple[Result, dict[str, Tensor]]:
    session = in_run(session, run_dir)
    seed_for_init(config.seed)
    section = SUBJECTS[name][0] if isinstance(name, str) else name
    strategy = build_strategy(section, session, config)
    loader = Loader(images(SAMPLES, 1), global_batch_size=BATCH, seed=config.seed, share=strategy.share)
    strategy.build(model, partial(build_optimizer, optim), criterion_objective(cross_entropy), loader.at(0))
    checkpoints = Checkpoints(checkpoint, session, strategy, identity(job or JobConfig()))
    schedule = partial(build_schedule, optim)
    trainer = Trainer(config, session, strategy, loader, schedule=schedule, checkpoints=checkpoints)
    result = trainer.fit(judge, hooks=hooks)
    return result, {name: e.value.clone() for name, e in strategy.state().items() if isinstance(e.value, Tensor)}


def logged(run_dir: Path, tag: str) -> dict[int, float]:
    lines = [json.loads(line) for line in (run_dir / "tensorboard" / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[tag] for line in lines if tag in line}


def assert_same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result, dict[str, Tensor]]:
    run_dir = tmp_path_factory.mktemp("undisturbed")
    return run_dir, *run_ranks(3, train, run_dir)[0]


def test_a_run_does_every_step_and_counts_epochs_and_samples(undisturbed: Any) -> None:
    _, result, _ = undisturbed
    assert (result.step, result.epoch, result.samples) == (10, 4, 200)
    assert result.metrics.keys() == {"eval/accuracy", "eval/loss", "train/loss"}


def test_evaluations_come_in_the_step_that_ends_an_epoch_and_at_the_end(undisturbed: Any) -> None:
    run_dir, result, _ = undisturbed
    accuracies = logged(run_dir, "eval/accuracy")
    assert list(accuracies) == [3, 5, 8, 10]
    assert accuracies[10] == result.metrics["eval/accuracy"]


def test_checkpoints_come_at_their_interval_and_at_the_end(undisturbed: Any) -> None:
    names = sorted(path.name for path in (undisturbed[0] / "checkpoints").iterdir())
    assert names == ["step-00000008", "step-00000010"]  # the newest two of 4, 8, 10


def die_after(
    session: Session,
    run_dir: Path,
    steps: int,
    checkpoint: CheckpointConfig = EVERY_4,
    name: str | StrategyConfig = "ddp",
    **options: Any,
) -> None:
    """A crash of one rank's loader: nothing is saved on the way out."""
    plain_at = Loader.at

    def at(self: Loader, step: int) -> Any:
        if step == steps:
            raise OSError("the disk is gone")
        return plain_at(self, step)

    Loader.at = at
    with pytest.raises(OSError, match="the disk is gone"):
        train(session, run_dir, checkpoint=checkpoint, name=name, **options)


def test_a_run_killed_between_checkpoints_ends_bit_for_bit_like_the_undisturbed_one(
    undisturbed: Any, tmp_path: Path
) -> None:
    run_ranks(3, die_after, tmp_path, 7)  # after the checkpoint of step 4
    assert list(logged(tmp_path, "train/loss")) == [1, 2, 3, 4, 5, 6, 7]
    for result, state in run_ranks(3, train, tmp_path):
        assert result == undisturbed[1]
        assert_same(state, undisturbed[2])
    assert logged(tmp_path, "train/loss") == logged(undisturbed[0], "train/loss")


def test_a_finished_run_is_not_evaluated_again(undisturbed: Any) -> None:
    run_dir, result, state = undisturbed
    before = logged(run_dir, "eval/accuracy")
    again, same = run_ranks(1, train, run_dir)[0]
    assert again == result
    assert_same(same, state)
    assert logged(run_dir, "eval/accuracy") == before


def stop_in_evaluation(
    session: Session,
    run_dir: Path,
    number: int,
    checkpoint: CheckpointConfig = EVERY_4,
    judge: Any = judge,
    hooks: Hooks | None = None,
) -> int:
    """Signal rank 1 alone, in the ``number``-th evaluation. Return the step at which this rank stopped."""
    calls = 0

    def judge_and_stop(strategy: Strategy, is_interrupted: Callable[[], bool]) -> dict[str, float] | None:
        nonlocal calls
        calls += 1
        if calls == number:
            if session.rank == 1:
                session.gate.request(STOP)
            wait_for(is_interrupted, 20, "the stop to be seen in the evaluation")
            if judge is judge_by_a_draw:
                return None  # it was cut; the real judge sees that by itself
        return judge(strategy, is_interrupted)

    with pytest.raises(StoppedError) as stopped:
        train(session, run_dir, judge=judge_and_stop, checkpoint=checkpoint, hooks=hooks)
    return int(str(stopped.value).split()[3])


@pytest.mark.parametrize(("number", "step"), [(2, 5), (4, 10)], ids=["middle", "end"])
def test_a_stop_in_an_evaluation_cuts_it_short_and_the_resumed_run_makes_up_for_it(
    undisturbed: Any, tmp_path: Path, number: int, step: int
) -> None:
    assert run_ranks(3, stop_in_evaluation, tmp_path, number) == [step] * 3
    assert newest_step(tmp_path / "checkpoints") == step
    assert step not in logged(tmp_path, "eval/accuracy")
    for result, state in run_ranks(3, train, tmp_path):
        assert result == undisturbed[1]
        assert_same(state, undisturbed[2])
    assert logged(tmp_path, "eval/accuracy") == logged(undisturbed[0], "eval/accuracy")


def judge_by_a_draw(strategy: Strategy, is_interrupted: Callable[[], bool]) -> dict[str, float] | None:
    return {"draw": strategy.sum({"draw": float(torch.rand(()))})["draw"]}


class Epochs(Hooks):
    def __init__(self) -> None:
        self.ends: list[tuple[int, float]] = []

    def on_epoch_end(self, epoch: int, metrics: Mapping[str, float]) -> None:
        self.ends.append((epoch, metrics["eval/draw"]))


def ends_of_epochs(session: Session, run_dir: Path) -> list[tuple[int, float]]:
    hooks = Epochs()
    train(session, run_dir, judge=judge_by_a_draw, hooks=hooks)
    return hooks.ends


def test_an_evaluation_made_up_for_draws_the_same_and_ends_its_epoch_then(tmp_path: Path) -> None:
    hooks = Epochs()
    run_ranks(2, partial(stop_in_evaluation, judge=judge_by_a_draw, hooks=hooks), tmp_path / "again", 2)
    whole, again = (run_ranks(2, ends_of_epochs, tmp_path / folder) for folder in ("whole", "again"))
    assert whole[0][1:] == again[0]
    assert [epoch for epoch, _ in whole[0]] == [0, 1, 2, 3]


def test_the_last_evaluation_is_the_same_on_any_number_of_ranks(undisturbed: Any, tmp_path: Path) -> None:
    run_ranks(3, stop_in_evaluation, tmp_path, 4)
    for world_size in (1, 2):
        copy = shutil.copytree(tmp_path, tmp_path.with_name(f"{tmp_path.name}-{world_size}"))
        for again, same in run_ranks(world_size, train, copy):
            assert again.metrics["eval/accuracy"] == undisturbed[1].metrics["eval/accuracy"]
            assert again.metrics["eval/loss"] == pytest.approx(undisturbed[1].metrics["eval/loss"], rel=1e-6)
            assert_same(same, undisturbed[2])


def stop_at(session: Session, run_dir: Path, step: int, name: str | StrategyConfig = "ddp") -> int:
    """Signal every rank twice, before it starts its ``step``-th step, at its own time."""
    plain_at, signalled_at = Loader.at, step

    def at(self: Loader, step: int) -> Any:
        if step == signalled_at:
            time.sleep(0.05 * session.rank)
            session.gate.request(STOP)
            stop_all(session.gate)
        return plain_at(self, step)

    Loader.at = at
    with pytest.raises(StoppedError) as stopped:
        train(session, run_dir, name=name)
    return int(str(stopped.value).split()[3])


def test_ranks_signalled_at_different_times_stop_at_one_step_and_nothing_is_lost(
    undisturbed: Any, tmp_path: Path
) -> None:
    (step,) = set(run_ranks(3, stop_at, tmp_path, 2))
    assert newest_step(tmp_path / "checkpoints") == step
    for result, state in run_ranks(3, train, tmp_path):
        assert result == undisturbed[1]
        assert_same(state, undisturbed[2])


def test_without_batch_statistics_other_ranks_train_alike_from_the_middle_on(
    tmp_path: Path,
) -> None:
    config = replace(CONFIG, log_every=3)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    ((result, state),) = run_ranks(1, train, whole, config, plain_model)
    run_ranks(2, train, parts, replace(config, max_steps=4), plain_model)
    for again, weights in run_ranks(3, train, parts, replace(config, accumulate=3), plain_model):
        assert again.metrics == pytest.approx(result.metrics, abs=1e-5)
        for name, weight in state.items():
            torch.testing.assert_close(weights[name], weight, atol=1e-5, rtol=0)


def test_the_loss_that_is_logged_is_the_mean_of_the_global_loss_over_the_window(tmp_path: Path) -> None:
    run_ranks(3, train, tmp_path / "each", replace(CONFIG, log_every=1), plain_model)
    run_ranks(2, train, tmp_path / "four", replace(CONFIG, log_every=4), plain_model)
    each = logged(tmp_path / "each", "train/loss")
    windows = {4: [1, 2, 3, 4], 8: [5, 6, 7, 8], 10: [9, 10]}
    expected = {step: np.mean([each[n] for n in window]) for step, window in windows.items()}
    assert logged(tmp_path / "four", "train/loss") == pytest.approx(expected, abs=1e-5)


def train_by_the_clock(session: Session, run_dir: Path) -> tuple[Result, dict[str, Tensor]]:
    """Train ranks whose steps differ in length. They save by rank 0's clock alone."""
    plain_at = Loader.at

    def at(self: Loader, step: int) -> Any:
        time.sleep(0.2 + 0.1 * session.rank)
        return plain_at(self, step)

    Loader.at = at
    return train(session, run_dir, checkpoint=CheckpointConfig(None, every_min=0.01, keep=9))


def test_all_ranks_save_at_the_step_that_rank_0s_clock_makes_them_agree_on(undisturbed: Any, tmp_path: Path) -> None:
    for result, state in run_ranks(3, train_by_the_clock, tmp_path):
        assert result == undisturbed[1]
        assert_same(state, undisturbed[2])
    checkpoints = CheckpointFolder(tmp_path / "checkpoints")
    steps = [checkpoints.verify(path).step for path in checkpoints.list()]
    assert steps[0] == 10
    assert 3 <= len(steps) < 10, steps


WITH_BEST = CheckpointConfig(4, keep_best="-eval/loss")


def test_the_best_checkpoint_by_a_metric_is_saved_and_stays_also_through_a_restart(
    undisturbed: Any, tmp_path: Path
) -> None:
    losses = logged(undisturbed[0], "eval/loss")
    run_ranks(3, die_after, tmp_path, 6, WITH_BEST)
    for result, state in run_ranks(3, partial(train, checkpoint=WITH_BEST), tmp_path):
        assert result == undisturbed[1]
        assert_same(state, undisturbed[2])
    checkpoints = CheckpointFolder(tmp_path / "checkpoints")
    best = min(losses, key=lambda step: losses[step])
    manifests = {checkpoints.verify(path).step: checkpoints.manifest(path) for path in checkpoints.list()}
    assert best == min(losses), "an early one, which the newer ones must not push out"
    assert manifests.keys() == {10, 8, best}
    assert manifests[best].meta["metrics"]["eval/loss"] == losses[best]


def test_the_best_checkpoint_stays_also_where_a_stop_has_cut_its_evaluation_short(
    undisturbed: Any, tmp_path: Path
) -> None:
    losses = logged(undisturbed[0], "eval/loss")
    assert run_ranks(3, stop_in_evaluation, tmp_path, 1, WITH_BEST) == [3] * 3
    assert min(losses, key=lambda step: losses[step]) == 3
    run_ranks(3, partial(train, checkpoint=WITH_BEST), tmp_path)
    checkpoints = CheckpointFolder(tmp_path / "checkpoints")
    manifests = {checkpoints.verify(path).step: checkpoints.manifest(path) for path in checkpoints.list()}
    assert manifests.keys() == {10, 8, 3}
    assert manifests[3].meta["metrics"]["eval/loss"] == losses[3]


def refused(session: Session, run_dir: Path) -> str:
    job = JobConfig()
    job.model.name, job.train.seed = "lenet", 8
    return refused_with(lambda: train(session, run_dir, job=job))


def test_a_resume_as_another_run_is_refused_with_each_key_and_both_values(undisturbed: Any) -> None:
    (message,) = run_ranks(1, refused, undisturbed[0])
    assert "model.name was 'mlp' and is now 'lenet'; train.seed was 0 and is now 8. Set them back" in message


def wait_in_vain(session: Session, run_dir: Path) -> list[str]:
    """Return rank 0's errors after waits for rank 1. One group has the session's limit, one its own."""
    groups: list[Any] = [dist.new_group(timeout=timedelta(seconds=limit_s)) for limit_s in (2, 3)]
    train(replace(session, timeout=timedelta(seconds=2)), run_dir, replace(CONFIG, max_steps=1))
    said = []
    for group in groups if session.rank == 0 else ():
        with pytest.raises(RuntimeError) as caught:
            dist.all_reduce(torch.zeros(1), group=group)
        said.append(str(caught.value))
    return said


def test_once_a_step_is_made_ranks_wait_less_long_for_each_other(tmp_path: Path) -> None:
    ours, own = run_ranks(2, wait_in_vain, tmp_path)[0]
    assert "1400ms" in ours
    assert "3000ms" in own
