"""Local SGD and DiLoCo against replicas in one process. Resumes inside a round and at its end; bytes."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from jobs.models import build_model
from tests.dist import test_trainer as trainer
from tests.dist.objectives import classification, cross_entropy
from tests.dist.ranks import refused_with, run_ranks, stop_all
from tests.dist.strategy_cases import (
    BATCH,
    OPTIMIZERS,
    eval_parts,
    global_batch,
    oracle,
    part,
    plain_model,
    rates,
    snapshot,
    token_loss,
)
from toolkit.base.errors import StoppedError
from toolkit.checkpoint.folder import CheckpointFolder, newest_step
from toolkit.config import CheckpointConfig, StrategyConfig, TrainConfig, load_config
from toolkit.config.learning_rate import build_schedule, total_steps
from toolkit.config.strategy import LocalSgdConfig
from toolkit.data.datasets import build_datasets
from toolkit.data.loader import Loader, build_loader, eval_batches
from toolkit.data.randomness import reseed, seed_for_init
from toolkit.ranks import collectives
from toolkit.ranks.batch import Share
from toolkit.ranks.session import Session
from toolkit.strategies import Criterion, Strategy, build_strategy, criterion_objective
from toolkit.train.evaluate import evaluate
from toolkit.train.optim import build_optimizer

pytestmark = [pytest.mark.dist, pytest.mark.sample(4)]

WORLD, STEPS = 3, 8
#: Not a multiple of the checkpoints' 4 steps: those are made inside of rounds.
AVERAGE, DILOCO = (
    StrategyConfig("local_sgd", local_sgd=LocalSgdConfig(round_steps=3, outer=outer)) for outer in ("average", "diloco")
)
#: (rounds, optimizer, criterion, parts of a share, samples of a global batch, the norm that gradients are clipped to)
CASES: list[tuple[LocalSgdConfig, str, Criterion, int, int, float | None]] = [
    (LocalSgdConfig(3), "sgd", cross_entropy, 1, 10, None),
    (LocalSgdConfig(3), "sgd", token_loss, 3, 10, None),
    (LocalSgdConfig(3), "adamw", cross_entropy, 3, 10, None),
    (LocalSgdConfig(2, after_steps=3), "nadam", token_loss, 1, 10, None),
    (LocalSgdConfig(3, outer="diloco"), "adamw", cross_entropy, 1, 10, None),
    (LocalSgdConfig(2, outer="diloco", outer_lr=0.5, outer_momentum=0.8), "sgd", token_loss, 3, 5, None),
    (LocalSgdConfig(3, after_steps=4, outer="diloco"), "adamw", cross_entropy, 1, 9, None),
    (LocalSgdConfig(3, after_steps=2), "sgd", cross_entropy, 3, 10, 0.2),
    (LocalSgdConfig(3, outer="diloco"), "adamw", token_loss, 1, 10, 0.5),
]


def simulate(
    local: LocalSgdConfig, optimizer: str, criterion: Criterion, size: int, clip: float | None
) -> list[tuple[float, dict[str, Tensor]]]:
    """Return the mean loss of each step and the mean weights after it. The code is plain, without ranks."""
    models = [plain_model() for _ in range(WORLD)]
    steppers = [OPTIMIZERS[optimizer](model) for model in models]
    anchor = deepcopy(models[0])
    outer = torch.optim.SGD(anchor.parameters(), local.outer_lr, momentum=local.outer_momentum, nesterov=True)
    weighed = np.zeros(WORLD)
    found = []
    for step in range(STEPS):
        totals, weights = [], []
        inputs, targets = global_batch(step, size)
        for rank, (model, stepper) in enumerate(zip(models, steppers, strict=True)):
            together = step < local.after_steps
            start, stop = (0, size) if together else Share(rank, WORLD).bounds(size)
            total, weight = criterion(model(inputs[start:stop]), targets[start:stop])
            weight = torch.tensor(float(stop - start)) if weight is None else weight
            stepper.param_groups[0]["lr"] = rates(step)
            stepper.zero_grad()
            (total / weight.clamp(min=1e-30)).backward()  # a share whose samples all weigh nothing has no gradient
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            stepper.step()
            totals.append(total.item())
            weights.append(weight.item())
        weighed += weights
        parts = weighed / weighed.sum() if step >= local.after_steps else np.full(WORLD, 1 / WORLD)
        found.append((sum(totals) / sum(weights), mean([dict(model.named_parameters()) for model in models], parts)))
        if step < local.after_steps:
            anchor.load_state_dict(models[0].state_dict())
            weighed[:] = 0
        elif (step + 1) % local.round_steps == 0:
            new = found[-1][1]
            if local.outer == "diloco":
                for name, weight in anchor.named_parameters():
                    weight.grad = weight.detach() - new[name]
                outer.step()
                new = {name: weight.detach().clone() for name, weight in anchor.named_parameters()}
                found[-1] = found[-1][0], new
            else:
                average_momenta(models, steppers, parts)
            for model in models:
                model.load_state_dict(new)
            weighed[:] = 0
    return found


def mean(replicas: list[dict[str, Any]], parts: Any) -> dict[str, Tensor]:
    return {
        name: torch.stack([one[name].detach() * part for one, part in zip(replicas, parts, strict=True)]).sum(0).float()
        for name in replicas[0]
    }


def average_momenta(models: list[nn.Module], steppers: list[torch.optim.Optimizer], parts: Any) -> None:
    for weights in zip(*(model.parameters() for model in models), strict=True):
        slots = [stepper.state[weight] for stepper, weight in zip(steppers, weights, strict=True)]
        for name in ("momentum_buffer", "exp_avg", "exp_avg_sq"):
            if name in slots[0]:
                total = mean([{name: slot[name]} for slot in slots], parts)
                for slot in slots:
                    slot[name].copy_(total[name])


def train_cases(session: Session) -> list[list[tuple[float, dict[str, Tensor]]]]:
    found = []
    for local, optimizer, criterion, accumulate, size, clip in CASES:
        config = StrategyConfig("local_sgd", local_sgd=local)
        strategy = build_strategy(config, session, TrainConfig(accumulate=accumulate, clip_norm=clip))
        strategy.build(
            plain_model, OPTIMIZERS[optimizer], criterion_objective(criterion), part(strategy.share, 0, size)
        )
        strategy.state()  # what a fresh start does when it looks for a checkpoint must not change the first step
        steps = []
        for n in range(STEPS):
            loss = strategy.step(part(strategy.share, n, size), rates(n)).loss.item()
            steps.append((loss, snapshot(strategy)))
        found.append(steps)
    return found


def test_steps_equal_those_of_as_many_replicas_in_one_process() -> None:
    ranks = run_ranks(WORLD, train_cases)
    for number, (local, optimizer, criterion, _, size, clip) in enumerate(CASES):
        for step, (loss, weights) in enumerate(simulate(local, optimizer, criterion, size, clip)):
            case = f"case {number}, step {step}"
            assert sum(rank[number][step][0] for rank in ranks) == pytest.approx(loss, abs=2e-6), case
            for rank in ranks:
                for name, weight in weights.items():
                    found = rank[number][step][1][f"model/{name}"]
                    torch.testing.assert_close(found, weight, atol=5e-6, rtol=0, msg=f"{case}, {name}")


def step_by_step(session: Session, accumulate: int, size: int) -> tuple[list[float], dict[str, Tensor]]:
    config = StrategyConfig("local_sgd", local_sgd=LocalSgdConfig(1))
    strategy = build_strategy(config, session, TrainConfig(accumulate=accumulate))
    strategy.build(plain_model, OPTIMIZERS["sgd"], criterion_objective(cross_entropy), part(strategy.share, 0, size))
    return [strategy.step(part(strategy.share, n, size), rates(n)).loss.item() for n in range(4)], snapshot(strategy)


@pytest.mark.parametrize(("accumulate", "size"), [(1, BATCH), (3, 5)])
def test_with_rounds_of_one_step_momentum_sgd_is_that_of_one_process_for_any_shares(accumulate: int, size: int) -> None:
    losses, weights = oracle("sgd", cross_entropy, size)
    ranks = run_ranks(3, step_by_step, accumulate, size)
    assert np.allclose(np.sum([rank[0] for rank in ranks], axis=0), losses, atol=1e-6)
    for _, found in ranks:
        for name, weight in weights.items():
            torch.testing.assert_close(found[f"model/{name}"], weight, atol=1e-6, rtol=0)


def look_between(session: Session, looks: bool) -> tuple[list[dict[str, Tensor]], list[dict[str, float] | None]]:
    """The replica's own weights after each step; with ``looks`` evaluated and saved in each."""
    strategy = build_strategy(DILOCO, session)
    strategy.build(
        trainer.noisy_model, OPTIMIZERS["adamw"], criterion_objective(cross_entropy), picture_part(strategy.share, 0)
    )
    own, figures = [], []
    for step in range(STEPS):
        reseed(5, step, session.rank)
        strategy.step(picture_part(strategy.share, step), 0.01)
        if looks:
            strategy.state()
            figures.append(trainer.judge(strategy, lambda: False))
        own.append(
            {name: value.clone() for name, value in strategy.live_state().items() if not name.startswith("buffers/")}
        )
    return own, figures


def picture_part(share: Share, step: int) -> Any:
    batch = Loader(trainer.images(50, 1), global_batch_size=20, seed=1, share=share).at(step)
    assert batch is not None
    return batch


def test_an_evaluation_and_a_save_inside_a_round_leave_every_replica_as_it_was() -> None:
    for (plain, _), (watched, figures) in zip(
        run_ranks(WORLD, look_between, False), run_ranks(WORLD, look_between, True), strict=True
    ):
        for one, other in zip(plain, watched, strict=True):
            trainer.assert_same(one, other)
        assert len({str(figure) for figure in figures}) == STEPS, "a model of each step was evaluated"


def differences(session: Session) -> list[tuple[float | Tensor, bool]]:
    strategy = build_strategy(AVERAGE, session)
    strategy.build(plain_model, OPTIMIZERS["adamw"], criterion_objective(cross_entropy), part(strategy.share, 0))
    found = []
    for step in range(6):
        strategy.step(part(strategy.share, step), 0.01)
        weight = strategy.live_state()["weights/0.weight"]
        every: list[Any] = [None] * session.world_size
        dist.all_gather_object(every, weight)
        found.append(
            (strategy.step_metrics().get("local_sgd/divergence", -1.0), all(torch.equal(weight, w) for w in every))
        )
    return found


def test_replicas_differ_inside_a_round_and_are_equal_bit_for_bit_at_its_end() -> None:
    for found in run_ranks(WORLD, differences):
        assert [equal for _, equal in found] == [False, False, True, False, False, True]
        assert [divergence > 0 for divergence, _ in found] == [False, False, True, False, False, True]


@pytest.mark.parametrize("config", [AVERAGE, DILOCO], ids=["average", "diloco"])
def test_a_run_killed_inside_a_round_ends_bit_for_bit_like_the_undisturbed_one(
    config: StrategyConfig, tmp_path: Path
) -> None:
    undisturbed = run_ranks(WORLD, partial(trainer.train, name=config), tmp_path / "whole")
    run_ranks(WORLD, partial(trainer.die_after, name=config), tmp_path / "parts", 7)
    assert newest_step(tmp_path / "parts" / "checkpoints") == 4, "inside a round"
    again = run_ranks(WORLD, partial(trainer.train, name=config), tmp_path / "parts")
    for (result, state), (other, restored) in zip(undisturbed, again, strict=True):
        assert other == result
        trainer.assert_same(restored, state)
    losses = [trainer.logged(tmp_path / folder, "train/loss") for folder in ("whole", "parts")]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 10


def train_up_to(config: StrategyConfig | str, steps: int) -> Callable[..., Any]:
    upto = replace(trainer.CONFIG, max_steps=steps)
    return partial(trainer.train, name=config, config=upto, model=plain_images, checkpoint=CheckpointConfig(3))


def plain_images() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 5))


def test_at_the_end_of_a_round_any_number_of_ranks_and_other_strategies_go_on(tmp_path: Path) -> None:
    ways: list[tuple[int, int, StrategyConfig | str]]
    ways = [(3, 3, AVERAGE), (6, 2, AVERAGE), (7, 3, "ddp"), (8, 2, "fsdp"), (10, 2, AVERAGE)]
    for steps, world_size, config in ways:
        for result, _ in run_ranks(world_size, train_up_to(config, steps), tmp_path):
            assert result.step == steps
    losses = trainer.logged(tmp_path, "train/loss")
    assert list(losses) == list(range(1, 11))
    assert losses[10] < losses[1]


def moments(session: Session, run_dir: Path, steps: int) -> dict[str, Tensor]:
    _, state = train_up_to(DILOCO, steps)(session, run_dir)
    return {name.replace(f"/rank{session.rank}/", "/"): value for name, value in state.items()}


def test_on_other_ranks_diloco_starts_from_mean_inner_moments_and_outer_momentum(
    tmp_path: Path,
) -> None:
    before = run_ranks(WORLD, moments, tmp_path, 3)
    for after in run_ranks(2, moments, tmp_path, 3):  # nothing is left to train: it is as loaded
        for name, value in after.items():
            expected = torch.stack([rank[name].double() for rank in before]).mean(0).float()
            assert torch.equal(value, expected), name
    assert not torch.equal(before[0]["optim/1.weight/exp_avg"], before[1]["optim/1.weight/exp_avg"])
    assert run_ranks(4, moments, tmp_path, 5)


def refused(session: Session, run_dir: Path, config: StrategyConfig | str) -> str:
    return refused_with(lambda: train_up_to(config, 10)(session, run_dir))


def test_inside_a_round_other_ranks_and_ddp_are_refused_with_what_to_do(tmp_path: Path) -> None:
    run_ranks(WORLD, train_up_to(AVERAGE, 3), tmp_path)
    run_ranks(WORLD, train_up_to(AVERAGE, 5), tmp_path)
    for world_size, config in [(2, AVERAGE), (3, "ddp")]:
        for message in run_ranks(world_size, refused, tmp_path, config):
            assert "step-00000005 was made inside a round of local_sgd" in message
            assert "only local_sgd on 3 ranks" in message
            assert "or from step-00000003, which is at a round's end" in message
    checkpoints = CheckpointFolder(tmp_path / "checkpoints")
    assert [path.name for path in checkpoints.list()] == ["step-00000005", "step-00000003"], "nothing was moved"


@pytest.mark.parametrize(
    ("steps", "first", "then", "words"),
    [(3, DILOCO, AVERAGE, "trained with diloco"), (5, AVERAGE, DILOCO, "inside a round that ends with an average")],
    ids=["from diloco", "to diloco"],
)
def test_the_other_way_to_meet_is_refused_where_something_would_be_lost(
    steps: int, first: StrategyConfig, then: StrategyConfig, words: str, tmp_path: Path
) -> None:
    run_ranks(2, train_up_to(first, steps), tmp_path)
    for message in run_ranks(2, refused, tmp_path, then):
        assert message.startswith("strategy.local_sgd.outer: ")
        assert words in message


def test_diloco_begins_from_a_checkpoint_of_ddp(tmp_path: Path) -> None:
    run_ranks(2, train_up_to("ddp", 5), tmp_path)
    for result, state in run_ranks(3, train_up_to(DILOCO, 10), tmp_path):
        assert result.step == 10
        assert "outer/1.weight/momentum" in state


def test_a_checkpoint_inside_a_round_has_the_mean_as_the_model(tmp_path: Path) -> None:
    from toolkit.checkpoint import whole

    run_ranks(WORLD, train_up_to(AVERAGE, 5), tmp_path)
    path = CheckpointFolder(tmp_path / "checkpoints").list()[0]
    manifest = CheckpointFolder(path.parent).manifest(path)
    _, records = whole.model_tensors(manifest.tensors)
    assert records.keys() == plain_images().state_dict().keys()
    replicas = [f"replica/rank{rank}/1.weight" for rank in range(WORLD)]
    parts = [(stop - start) / 20 for start, stop in (Share(rank, WORLD).bounds(20) for rank in range(WORLD))]
    found = [whole.read(path, name, manifest.tensors[name]) * part for name, part in zip(replicas, parts, strict=True)]
    torch.testing.assert_close(whole.read(path, "1.weight", records["1.weight"]), sum(found), atol=1e-6, rtol=0)


class Counts(nn.Linear):
    """Keeps the number of its passes beside its tensors."""

    passes = 0

    def forward(self, images: Tensor) -> Tensor:
        self.passes += self.training
        return super().forward(images)

    def get_extra_state(self) -> int:
        return self.passes

    def set_extra_state(self, state: int) -> None:
        self.passes = state


def counting_images() -> nn.Module:
    return nn.Sequential(nn.Flatten(), Counts(16, 5))


def test_a_damaged_file_is_passed_over_where_the_model_has_extra_state(tmp_path: Path) -> None:
    """Before, the rank that found the damage and the others waited for each other."""
    config = replace(trainer.CONFIG, max_steps=5)
    train = partial(trainer.train, name=AVERAGE, config=config, model=counting_images, checkpoint=CheckpointConfig(3))
    run_ranks(2, train, tmp_path)
    file = tmp_path / "checkpoints" / "step-00000005" / "rank-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1])  # rank 0 finds it by its size
    for result, _ in run_ranks(2, train, tmp_path):
        assert result.step == 5
    assert len(list(tmp_path.glob("checkpoints/step-00000005.bad-*"))) == 1


@pytest.mark.parametrize(("config", "steps"), [(AVERAGE, 5), (DILOCO, 3)], ids=["inside a round", "at a round's end"])
def test_ranks_that_differ_finish_their_round_whatever_after_steps_says(
    config: StrategyConfig, steps: int, tmp_path: Path
) -> None:
    run_ranks(2, train_up_to(config, steps), tmp_path)
    later = StrategyConfig("local_sgd", local_sgd=replace(config.local_sgd, after_steps=100))
    (_, one), (_, other) = run_ranks(2, train_up_to(later, 6), tmp_path)
    assert not any(name.startswith("replica/") for name in one), "the round has ended"
    weights = [name for name in one if name.startswith("model/")]
    trainer.assert_same({name: one[name] for name in weights}, {name: other[name] for name in weights})


def run_ahead(session: Session, run_dir: Path) -> int:
    """Let rank 1 wait in step 1 until rank 0 begins step 6. Then rank 2 asks for a stop."""
    plain_at = Loader.at

    def at(self: Loader, step: int) -> Any:
        if session.rank == 0 and step == 6:
            session.store.set("rank 0 is far ahead", "1")
        if session.rank == 1 and step == 1:
            session.store.wait(["rank 0 is far ahead"])
        if session.rank == 2 and step == 1:
            session.store.wait(["rank 0 is far ahead"])
            stop_all(session.gate)
        return plain_at(self, step)

    Loader.at = at
    config = StrategyConfig("local_sgd", local_sgd=LocalSgdConfig(round_steps=9))  # no rank waits before step 9
    quiet = replace(trainer.CONFIG, log_every=9, eval_every=9)
    with pytest.raises(StoppedError) as stopped:
        trainer.train(session, run_dir, quiet, name=config, checkpoint=CheckpointConfig(None))
    return int(str(stopped.value).split()[3])


def test_a_rank_far_ahead_of_the_others_stops_at_the_same_step_as_they(tmp_path: Path) -> None:
    (step,) = set(run_ranks(WORLD, run_ahead, tmp_path))
    assert step >= 7
    assert newest_step(tmp_path / "checkpoints") == step


def train_digits(session: Session, path: str, overrides: list[str]) -> tuple[float, int]:
    """Return a config's final accuracy, and the bytes that this rank gave to all-reduce."""
    config = load_config(path, overrides, site=False)
    seed_for_init(config.train.seed)
    data = build_datasets(config.data)
    sent = count_bytes()
    strategy = build_strategy(config.strategy, session, config.train)
    loader = build_loader(data.train, config.data, strategy.share, seed=config.train.seed)
    model = partial(build_model, config.model.name, data.classes, data.sample_shape)
    strategy.build(model, partial(build_optimizer, config.optim), criterion_objective(cross_entropy), loader.at(0))
    steps = total_steps(config.train, loader.dataset_size, loader.global_batch_size)
    rate = build_schedule(config.optim, steps)
    sent.clear()  # priming's
    for step in range(steps):
        reseed(config.train.seed, step, strategy.share.index)
        strategy.step(loader.at(step), rate(step))
    total = sum(sent)
    batches = eval_batches(data.eval, strategy.share, 256)
    return evaluate(strategy, batches, len(data.eval), classification)["accuracy"], total


def count_bytes() -> list[int]:
    """Return a list that gets the bytes of every all-reduce from now on. A hook counts DDP's buckets, too."""
    sent: list[int] = []
    plain, wrap = dist.all_reduce, nn.parallel.DistributedDataParallel.__init__

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(tensor.numel() * tensor.element_size())
        return plain(tensor, *args, **kwargs)

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        wrap(self, *args, **kwargs)
        self.register_comm_hook(None, allreduce_hook)

    dist.all_reduce = counted
    nn.parallel.DistributedDataParallel.__init__ = wrapped
    return sent


DIGITS_DILOCO = [f"strategy.local_sgd.{change}" for change in ("outer=diloco", "outer_momentum=0.5", "after_steps=96")]


def test_digits_are_learned_as_well_as_by_ddp_with_a_fraction_of_the_bytes() -> None:
    ways = {"ddp": ("ddp", []), "average": ("local_sgd", []), "diloco": ("local_sgd", DIGITS_DILOCO)}
    found = {
        way: run_ranks(2, train_digits, f"configs/digits_{name}.yaml", more)[0] for way, (name, more) in ways.items()
    }
    accuracies, sent = ({way: each[i] for way, each in found.items()} for i in (0, 1))
    assert accuracies["average"] > accuracies["ddp"] - 0.005
    assert accuracies["diloco"] > accuracies["ddp"] - 0.005
    assert sent["average"] < 0.26 * sent["ddp"], "weights and momenta every eight steps"
    assert sent["diloco"] < 0.33 * sent["ddp"], "gradients in 96 of 450 steps, then weights every eight"


def figures(session: Session) -> tuple[dict[str, float | Tensor], dict[str, float | Tensor]]:
    strategy: Strategy = build_strategy(StrategyConfig("local_sgd", local_sgd=LocalSgdConfig(4)), session)
    strategy.build(plain_model, OPTIMIZERS["sgd"], criterion_objective(cross_entropy), part(strategy.share, 0))
    strategy.step_metrics()
    for step in range(8):
        strategy.step(part(strategy.share, step), 0.1)
    evaluate(strategy, eval_parts(strategy.share, 9, 3), 9, classification)
    return dict(strategy.step_metrics()), dict(strategy.step_metrics())


def test_the_bytes_that_are_shown_are_those_of_the_weights_and_momenta_of_its_rounds() -> None:
    size = sum(4 * weight.numel() for weight in plain_model().parameters())
    for found, again in run_ranks(2, figures):
        assert found["local_sgd/bytes_per_step"] == (2 * (2 * size + 8)) / 8
        assert found["local_sgd/bytes_per_step_of_ddp"] == size
        assert "local_sgd/divergence" not in again
        assert again["local_sgd/bytes_per_step"] == 0


def sum_in_pieces(session: Session) -> tuple[list[Tensor], list[Tensor], int, list[int]]:
    collectives.BUCKET_BYTES = 100
    draw = torch.Generator().manual_seed(session.rank)
    shapes = [(0, 2), (3, 4), (5,), (), (7, 9), (2,)]
    tensors = [torch.randn(shape, generator=draw) for shape in shapes]
    tensors += [torch.randn(4, 6, generator=draw).t(), torch.randn(3, generator=draw).double()]
    before = [tensor.clone() for tensor in tensors]
    messages = count_bytes()
    sent = collectives.sum_tensors(tensors, part=0.5 + session.rank)
    return before, tensors, sent, messages


def test_sums_are_made_in_messages_of_bounded_size_whatever_the_shapes_and_types() -> None:
    ranks = run_ranks(2, sum_in_pieces)
    for _, sums, sent, messages in ranks:
        for number, found in enumerate(sums):
            expected = 0.5 * ranks[0][0][number] + 1.5 * ranks[1][0][number]
            torch.testing.assert_close(found, expected)
        assert messages == [4 * (12 + 5 + 1), 4 * 63, 4 * 2, 4 * 24, 8 * 3]
        assert sent == sum(messages)
