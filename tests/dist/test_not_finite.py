"""A loss that is not finite: the attempt's end and message, and the checkpoints kept."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.dist import test_trainer as trainer
from tests.dist.ranks import run_ranks
from tests.dist.test_rollback import spoilt
from tests.dist.test_trainer import BATCH, CONFIG, SAMPLES, logged
from toolkit.base.errors import NotFiniteError
from toolkit.checkpoint import whole
from toolkit.checkpoint.folder import CheckpointFolder
from toolkit.config import StrategyConfig, TrainConfig
from toolkit.data.permutation import ShuffledOrder
from toolkit.ranks.session import Session

pytestmark = pytest.mark.dist

#: 10 steps, saved after 4, 8 and 10; the mean of two steps is logged after 2, 4, 6, 8, 10.
STOP = replace(CONFIG, log_every=2)
WARN = replace(STOP, on_nan="warn")


OTHERS = ("fsdp", "pipeline")


def bursting() -> nn.Module:
    """Return a model whose outputs are finite, but not its gradient in step 5."""
    model, passes = trainer.plain_model(), itertools.count(-1)  # the first pass is that of priming
    model.get_parameter("1.weight").register_hook(
        lambda gradient: gradient * torch.inf if next(passes) == 5 else gradient
    )
    return model


def run(
    session: Session, run_dir: Path, attempt: int, config: TrainConfig, *bad: int, model: Any = None, name: str = "ddp"
) -> Any:
    """In a process group that has had others; ``attempt`` keeps their messages apart."""
    with spoilt(bad):
        try:
            here = replace(session, attempt=attempt)
            return trainer.train(here, run_dir, config, model or trainer.plain_model, name=StrategyConfig(name))[0]
        except NotFiniteError as error:
            return str(error)


def stories(session: Session, folder: Path) -> dict[str, Any]:
    return {
        "stop": run(session, folder / "stop", 1, STOP, 5),
        "diverged": run(session, folder / "diverged", 2, STOP, model=bursting),
        "last": run(session, folder / "last", 3, STOP, 9),
        "warn": run(session, folder / "warn", 4, WARN, 5),
        **{name: run(session, folder / name, 6 + n, STOP, 5, name=name) for n, name in enumerate(OTHERS)},
        "skip": run(session, folder / "skip", 5, replace(STOP, skip_bad_steps=True), 4, 5, 6, 7),
    }


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("stories")
    return folder, run_ranks(2, stories, folder, limit_s=240.0)


def saved(run_dir: Path) -> dict[int, bool]:
    """Return for each checkpoint's step, newest first, whether its weights are finite. Its manifest says the same."""
    checkpoints, found = CheckpointFolder(run_dir / "checkpoints"), {}
    for path in checkpoints.list():
        manifest = checkpoints.verify(path)
        records = manifest.tensors
        weights = [whole.read(path, name, record) for name, record in records.items() if name.startswith("model/")]
        found[manifest.step] = all(bool(weight.isfinite().all()) for weight in weights)
        assert (bool(weights), manifest.meta["finite"]) == (True, found[manifest.step])
    return found


def test_a_second_mean_that_is_not_finite_ends_with_step_samples_and_layer(told: Any) -> None:
    folder, ranks = told
    samples = ShuffledOrder(SAMPLES, CONFIG.seed).at(torch.arange(5 * BATCH, 6 * BATCH).numpy()).tolist()
    first = ", ".join(map(str, samples[:8]))
    for rank in ranks:
        assert rank["stop"].startswith(
            f"train.on_nan: the loss is not finite since step 5 on rank 1 (samples {first} and 12 more); with the "
            "weights of the checkpoint of step 4 the first output for these samples that is not finite is that of "
            "layer 0 (Flatten). Look at"
        )
    assert saved(folder / "stop") == {4: True}
    assert list(logged(folder / "stop", "train/lr")) == [2, 4, 6]


def test_of_a_training_that_diverged_no_layer_is_blamed(told: Any) -> None:
    for rank in told[1]:
        assert "the loss is not finite since step 6 (samples" in rank["diverged"]
        assert "with the weights of the checkpoint of step 4 all layers give finite values" in rank["diverged"]
    assert saved(told[0] / "diverged") == {4: True}


@pytest.mark.parametrize("name", OTHERS)
def test_every_strategy_ends_such_an_attempt_everywhere_and_keeps_a_good_checkpoint(told: Any, name: str) -> None:
    for rank in told[1]:
        assert rank[name].startswith("train.on_nan: the loss is not finite since step 5 on rank 1 (samples")
        assert ("that is not finite is that of layer 0 (Flatten)." in rank[name]) == (name == "fsdp")
    assert saved(told[0] / name) == {4: True}


def test_a_run_is_not_completed_with_weights_that_are_not_finite(told: Any) -> None:
    for rank in told[1]:
        assert rank["last"].startswith("train.on_nan: the loss is not finite since step 9")
    assert saved(told[0] / "last") == {8: True, 4: True}


def test_a_run_that_is_only_warned_trains_on_and_keeps_the_last_finite_checkpoint(told: Any) -> None:
    for rank in told[1]:
        assert rank["warn"].step == 10
        assert rank["warn"].metrics["train/not_finite"] == 3
    assert saved(told[0] / "warn") == {10: False, 8: False, 4: True}


def test_steps_that_are_left_out_are_no_loss_that_is_not_finite(told: Any) -> None:
    for rank in told[1]:
        assert rank["skip"].step == 10
        assert rank["skip"].metrics["train/skipped_steps"] == 4
        assert "train/not_finite" not in rank["skip"].metrics
