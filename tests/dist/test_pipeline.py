"""What a pipeline alone could get wrong: schedules, random numbers, evaluation, checkpoints, who holds what."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.dist import test_trainer as trainer
from tests.dist.objectives import classification, cross_entropy
from tests.dist.ranks import refused_with, run_ranks
from tests.dist.strategy_cases import (
    CLASSES,
    FEATURES,
    OPTIMIZERS,
    STEPS,
    SUBJECTS,
    built,
    eval_parts,
    global_batch,
    noisy_model,
    oracle,
    part,
    plain_model,
    rates,
    snapshot,
    token_loss,
)
from tests.dist.test_fsdp import image_model
from toolkit.checkpoint import manifest
from toolkit.checkpoint.folder import CheckpointFolder, newest_step
from toolkit.checkpoint.reader import load
from toolkit.checkpoint.whole import export
from toolkit.checkpoint.writer import save
from toolkit.config import MeshConfig, StrategyConfig, TrainConfig
from toolkit.config.strategy import PipelineConfig
from toolkit.data.randomness import reseed
from toolkit.ranks.session import Session
from toolkit.strategies import Criterion, Loss, Objective, Strategy, build_strategy, criterion_objective
from toolkit.train.evaluate import evaluate

pytestmark = [pytest.mark.dist, pytest.mark.sample(4)]


def make(
    session: Session,
    config: StrategyConfig,
    model: Callable[[], nn.Module],
    optimizer: str = "sgd",
    criterion: Criterion = cross_entropy,
    size: int = 10,
    **options: Any,
) -> Strategy:
    strategy = build_strategy(config, session, TrainConfig(**options))
    strategy.build(model, OPTIMIZERS[optimizer], criterion_objective(criterion), part(strategy.share, 0, size))
    return strategy


def pipeline(schedule: str, micro_batches: int | None = None, **mesh: int) -> StrategyConfig:
    return StrategyConfig("pipeline", mesh=MeshConfig(**mesh), pipeline=PipelineConfig(schedule, micro_batches))


def train_schedules(session: Session) -> list[tuple[list[float], dict[str, Tensor]]]:
    found = []
    for config, criterion, size in SCHEDULED:
        strategy = make(session, config, plain_model, "adamw", criterion, size)
        losses = [strategy.step(part(strategy.share, n, size), rates(n)).loss.item() for n in range(STEPS)]
        found.append((losses, snapshot(strategy)))
    return found


SCHEDULED = [
    (pipeline("gpipe"), cross_entropy, 10),
    (pipeline("interleaved"), cross_entropy, 10),
    (pipeline("interleaved", 6), token_loss, 17),  # micro-batches of two and three samples
]


def test_every_schedule_takes_the_steps_of_one_process() -> None:
    ranks = run_ranks(2, train_schedules)
    for case, (_, criterion, size) in enumerate(SCHEDULED):
        losses, weights = oracle("adamw", criterion, size)
        assert np.allclose(np.sum([rank[case][0] for rank in ranks], axis=0), losses, atol=1e-6)
        for name, weight in weights.items():
            for rank in ranks:
                torch.testing.assert_close(rank[case][1][f"model/{name}"], weight, atol=1e-6, rtol=0, msg=name)


class Mask(nn.Module):
    """Dropout of ones, added to what comes in; keeps what it drew."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(FEATURES))
        self.drawn: list[tuple[float, ...]] = []

    def forward(self, inputs: Tensor) -> Tensor:
        mask = nn.functional.dropout(torch.ones(inputs.shape[0], 64), 0.5, self.training)
        self.drawn.append(tuple(mask.flatten().tolist()))
        return inputs * self.weight + mask.sum()


def draw(session: Session, schedule: str) -> dict[int, list[tuple[float, ...]]]:
    """Return the masks of two steps by the layer's number, the first step's first."""
    masks: list[Mask] = []

    def model() -> nn.Module:
        masks[:] = [Mask() for _ in range(4)]
        return nn.Sequential(*masks, nn.Linear(FEATURES, CLASSES))

    split = ["1", "2", "3"] if schedule == "interleaved" else ["2"]
    config = pipeline(schedule, 4)
    config.pipeline.split = split
    strategy = make(session, config, model, size=8)
    held = [number for number, mask in enumerate(masks) if f"weights/{number}.weight" in strategy.live_state()]
    for mask in masks:
        mask.drawn.clear()  # those of priming
    for step in (7, 8):
        reseed(3, step, strategy.share.index)
        strategy.step(part(strategy.share, 0, 8), 0.0)
    return {number: masks[number].drawn for number in held}


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved"])
def test_no_two_passes_of_a_stage_draw_the_same_random_numbers(schedule: str) -> None:
    found: dict[int, list[tuple[float, ...]]] = {}
    for rank in run_ranks(2, draw, schedule):
        assert not found.keys() & rank.keys()
        found |= rank
    assert sorted(found) == [0, 1, 2, 3]
    assert all(len(masks) == 8 for masks in found.values())
    assert len({mask for masks in found.values() for mask in masks}) == 32


def train_noisily(session: Session, schedule: str) -> dict[str, Tensor]:
    strategy = make(session, pipeline(schedule, 5), noisy_model, "adamw", size=15)
    for step in range(3):
        reseed(5, step, strategy.share.index)
        strategy.step(part(strategy.share, step, 15), rates(step))
    return snapshot(strategy)


def test_gpipe_and_1f1b_make_the_same_passes_bit_for_bit_in_another_order() -> None:
    trainer.assert_same(run_ranks(3, train_noisily, "gpipe")[0], run_ranks(3, train_noisily, "1f1b")[0])


def evaluate_at_once(session: Session, schedule: str) -> list[dict[str, float] | None]:
    """Before any step; sizes that leave micro-batches uneven, fewer than ranks, and replicas without any."""
    strategy = make(session, pipeline(schedule, stages=2), plain_model)
    return [
        evaluate(strategy, eval_parts(strategy.share, size, batch), size, classification)
        for size, batch in ((25, 4), (25, 100), (2, 1))
    ]


@pytest.mark.parametrize(("schedule", "world_size"), [("interleaved", 2), ("1f1b", 4)])
def test_an_evaluation_before_the_first_step_counts_each_sample_once(schedule: str, world_size: int) -> None:
    ranks = run_ranks(world_size, evaluate_at_once, schedule)
    for case, size in enumerate((25, 25, 2)):
        inputs, targets = global_batch(7, size)
        outputs = plain_model()(inputs)
        loss = nn.functional.cross_entropy(outputs, targets).item()
        for rank in ranks:
            assert rank[case] == ranks[0][case]
            assert rank[case]["accuracy"] == (outputs.argmax(1) == targets).sum().item() / size
            assert rank[case]["loss"] == pytest.approx(loss, rel=1e-6)


def held(session: Session) -> tuple[set[str], list[str]]:
    devices = []

    def model() -> nn.Module:
        devices.append(torch.empty(()).device.type)
        return plain_model()

    strategy = make(session, pipeline("1f1b", replicas=2), model, "adamw")
    strategy.step(part(strategy.share, 0), 0.1)
    return set(strategy.live_state()), devices


def test_a_rank_has_state_of_its_layers_only_and_rank_0_alone_makes_the_model() -> None:
    ranks = run_ranks(4, held)
    for (names, devices), stage in zip(ranks, (0, 0, 1, 1), strict=True):
        assert {name.split("/")[1].partition(".")[0] for name in names} == ({"0", "1"} if stage == 0 else {"2", "3"})
        assert devices == (["cpu"] if names is ranks[0][0] else ["meta"])
    whole = {f"weights/{name}" for name in plain_model().state_dict()}
    assert {name for names, _ in ranks for name in names if "weights/" in name} == whole


def save_it(session: Session, folder: Path) -> dict[str, Tensor]:
    strategy = built("pipeline x replicas", session, noisy_model, "adamw", size=16)
    for step in range(2):
        strategy.step(part(strategy.share, step, 16), rates(step))
    checkpoints, ranks = CheckpointFolder(folder), session.world_size
    save(checkpoints, 2, strategy.state(), {}, rank=session.rank, world_size=ranks, kv=session.store)
    return snapshot(strategy)


def load_it(session: Session, folder: Path, name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    strategy = built(name, session, lambda: noisy_model().apply(_zero), "adamw", size=16)
    state = strategy.state()
    checkpoints, ranks = CheckpointFolder(folder), session.world_size
    strategy.on_loaded(load(checkpoints, state, rank=session.rank, world_size=ranks, kv=session.store).values)
    return snapshot(strategy), {name: value.clone() for name, value in strategy.live_state().items()}


def _zero(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.zeros_(parameter)


def test_a_checkpoint_has_each_tensor_once_and_fills_replicas_and_other_strategies(tmp_path: Path) -> None:
    saved = run_ranks(4, save_it, tmp_path)[0]
    folder = tmp_path / "step-00000002"
    records = manifest.read(folder).tensors
    assert records.keys() == saved.keys()
    assert all(sum(1 for each in record.parts if each.size_bytes) == 1 for record in records.values())
    # Of two replicas of a stage only one writes it.
    assert {each.file for record in records.values() for each in record.parts if each.size_bytes} == {
        manifest.file_name(0),
        manifest.file_name(2),
    }
    for name in ("pipeline x replicas", "pipeline", "ddp", "fsdp"):
        ranks = run_ranks(SUBJECTS[name][1], load_it, tmp_path, name)
        for found, live in ranks:
            trainer.assert_same(found, saved)
            for key, value in live.items() if name != "fsdp" else ():
                assert torch.equal(
                    value,
                    saved[
                        key.replace("weights/", "model/").replace("buffers/", "model/").replace("optimizer/", "optim/")
                    ],
                )


def test_an_export_is_the_whole_model(tmp_path: Path) -> None:
    saved = run_ranks(4, save_it, tmp_path)[0]
    folder = tmp_path / "step-00000002"
    export(folder, manifest.read(folder), tmp_path / "whole.pt", "torch", run="this one")
    model = noisy_model()
    model.load_state_dict(torch.load(tmp_path / "whole.pt"))
    assert all(torch.equal(value, saved[f"model/{name}"]) for name, value in model.state_dict().items())


def test_a_run_continues_alike_with_other_numbers_of_stages_and_other_strategies(tmp_path: Path) -> None:
    config = replace(trainer.CONFIG, log_every=1)
    ((result, _),) = run_ranks(1, trainer.train, tmp_path / "whole", config, image_model)
    for number, (name, world_size) in enumerate([("ddp", 2), ("pipeline", 3), ("pipeline", 2), ("fsdp", 2)], 1):
        part_of_it = partial(trainer.train, name=name)
        steps = replace(config, max_steps=None if number == 4 else 3 * number - 1)
        ranks = run_ranks(world_size, part_of_it, tmp_path / "parts", steps, image_model)
    assert ranks[0][0].metrics == pytest.approx(result.metrics, abs=1e-5)
    losses = [trainer.logged(tmp_path / folder, "train/loss") for folder in ("whole", "parts")]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    assert len(losses[1]) == 10


def test_ranks_signalled_at_different_times_stop_at_one_step(tmp_path: Path) -> None:
    (step,) = set(run_ranks(2, partial(trainer.stop_at, name="pipeline"), tmp_path, 2))
    assert newest_step(tmp_path / "checkpoints") == step


class Idle(nn.Module):
    """A parameter of a layer that is called is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(FEATURES, FEATURES), nn.Linear(3, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.used(inputs)


class Broken(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            raise ArithmeticError("a mistake of the model's own")
        return super().forward(inputs)


def refusal(session: Session) -> str:
    return refused_with(
        lambda: make(session, pipeline("1f1b", 2), lambda: nn.Sequential(nn.Linear(FEATURES, FEATURES), Idle()))
    )


def test_a_parameter_that_one_stage_does_not_use_is_refused_on_every_rank() -> None:
    assert all("depend on 1.idle.weight, 1.idle.bias; freeze" in message for message in run_ranks(2, refusal))


def call_twice(session: Session) -> str:
    def contrast(model: Any, batch: Any) -> Loss:
        return Loss.sum((model(batch.inputs) - model(batch.inputs.flip(1))).square().sum(), len(batch))

    strategy = build_strategy(pipeline("1f1b", 2), session, TrainConfig())
    return refused_with(
        lambda: strategy.build(plain_model, OPTIMIZERS["sgd"], Objective(contrast), part(strategy.share, 0, 10))
    )


def test_a_loss_that_calls_the_model_twice_is_refused_on_every_rank() -> None:
    assert all("makes one pass through the model for a batch" in text for text in run_ranks(2, call_twice))


def fail(session: Session) -> str:
    with pytest.raises(ArithmeticError) as caught:
        make(session, pipeline("1f1b"), lambda: nn.Sequential(Broken(FEATURES, CLASSES)))
    return str(caught.value)


def test_an_error_of_a_layer_is_raised_as_it_is() -> None:
    assert run_ranks(1, fail) == ["a mistake of the model's own"]
