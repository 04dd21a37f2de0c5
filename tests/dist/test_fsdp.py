"""Memory under sharding, and its own risks: first values, stops, other ranks, refusals."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from tests.dist import test_trainer as trainer
from tests.dist.objectives import classification, cross_entropy
from tests.dist.ranks import refused_with, run_ranks
from tests.dist.strategy_cases import (
    CLASSES,
    FEATURES,
    OPTIMIZERS,
    SAMPLE,
    SUBJECTS,
    Residual,
    built,
    eval_parts,
    global_batch,
    part,
    plain_model,
    rates,
    snapshot,
    token_loss,
)
from toolkit.config import StrategyConfig, TrainConfig
from toolkit.ranks.session import Session
from toolkit.ranks.state import local
from toolkit.strategies import build_strategy, criterion_objective
from toolkit.train.evaluate import evaluate

pytestmark = [pytest.mark.dist, pytest.mark.sample(4)]


def size_bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class Even(nn.Module):
    """A block whose every parameter 4 ranks cut evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(8, 64), nn.Linear(64, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.out(self.into(inputs).relu())


def even_model() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), Even(), Even(), nn.Linear(8, CLASSES))


def bytes_held(session: Session, name: str) -> dict[str, int]:
    """Return this rank's bytes of weights, gradients and moments, as the optimizer's step begins."""
    found: dict[str, int] = {}

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        made = torch.optim.AdamW(model.parameters(), 0.01)

        def look(*_: Any) -> None:
            gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            found["gradients"] = size_bytes(getattr(gradient, "_local_tensor", gradient) for gradient in gradients)

        made.register_step_pre_hook(look)  # all gradients are there, and none is freed yet
        return made

    strategy = build_strategy(StrategyConfig(name), session)
    strategy.build(even_model, optimizer, criterion_objective(cross_entropy), part(strategy.share, 0))
    strategy.step(part(strategy.share, 0), 0.1)
    live = strategy.live_state()
    found["weights"] = size_bytes(value for key, value in live.items() if key.startswith("weights/"))
    found["moments"] = size_bytes(value for key, value in live.items() if "/exp_avg" in key)
    return found


@pytest.mark.parametrize("name", ["fsdp", "zero"])
def test_weights_gradients_and_optimizer_state_of_a_rank_are_an_nth_of_the_whole(name: str) -> None:
    size = size_bytes(even_model().parameters())
    for world_size in (2, 4):
        for found in run_ranks(world_size, bytes_held, name):
            assert found == {
                "weights": size // world_size,
                "gradients": size // world_size,
                "moments": 2 * size // world_size,
            }


def gradients_of(session: Session, name: str, compression: str) -> list[Tensor]:
    """This rank's parts of the first step's gradients, as the optimizer gets them."""
    found: list[Tensor] = []

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        made = torch.optim.SGD(model.parameters(), 0.1)
        gradients = (local(parameter.grad).clone() for parameter in model.parameters())
        made.register_step_pre_hook(lambda *_: found.extend(gradients))
        return made

    torch.manual_seed(0)
    strategy = build_strategy(StrategyConfig(name, compression=compression), session)
    strategy.build(even_model, optimizer, criterion_objective(cross_entropy), part(strategy.share, 0))
    strategy.step(part(strategy.share, 0), 0.1)
    return found


@pytest.mark.parametrize("name", ["fsdp", "zero"])
def test_gradients_are_summed_in_bf16_where_that_is_asked_for(name: str) -> None:
    plain, halved = (run_ranks(2, gradients_of, name, compression) for compression in ("none", "bf16"))
    for exact, rounded in zip(plain, halved, strict=True):
        for one, other in zip(exact, rounded, strict=True):
            assert other.dtype == torch.float32
            assert torch.equal(other, other.bfloat16().float())
            torch.testing.assert_close(other, one, rtol=0.02, atol=1e-3)
        assert not all(torch.equal(one, one.bfloat16().float()) for one in exact)


def gathered_ahead(session: Session, name: str, ahead: int) -> tuple[dict[str, Tensor], list[str]]:
    """Return the state after two steps, and what was gathered ahead in the last one."""
    asked: list[str] = []
    prefetch = FSDPParamGroup._prefetch_unshard

    def noted(target: Any, way: Any) -> None:
        asked.append(f"{way} {target._module_fqn}")
        prefetch(target, way)

    FSDPParamGroup._prefetch_unshard = staticmethod(noted)  # type: ignore[assignment]
    strategy = build_strategy(StrategyConfig(name, prefetch_blocks=ahead), session)

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(FEATURES, 8), Even(), Even(), Even(), nn.Linear(8, CLASSES))

    strategy.build(model, OPTIMIZERS["sgd"], criterion_objective(cross_entropy), part(strategy.share, 0))
    for step in range(2):
        asked.clear()
        strategy.step(part(strategy.share, step), 0.1)
    return snapshot(strategy), asked


@pytest.mark.parametrize("name", ["fsdp", "zero"])
def test_two_blocks_gathered_ahead_train_to_the_bits_of_one(name: str) -> None:
    one, two = (run_ranks(2, gathered_ahead, name, ahead) for ahead in (1, 2))
    for (expected, _), (found, asked) in zip(one, two, strict=True):
        trainer.assert_same(found, expected)
        assert [line for line in asked if line.startswith("forward")] == [
            *("forward 1", "forward 2"),  # while the root's own layers compute
            *("forward 2", "forward 3"),
            "forward 3",
        ]
        assert [line for line in asked if line.startswith("backward")] == [
            *("backward 3", "backward 2"),
            *("backward 2", "backward 1"),
            "backward 1",
        ]
    assert not [line for _, asked in one for line in asked if line.startswith("forward")]


class Tied(nn.Module):
    """One weight under two names, a buffer that no state dict holds, and blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(FEATURES, 8, bias=False), nn.Linear(FEATURES, 8, bias=False)
        self.out.weight = self.into.weight
        self.blocks = nn.ModuleList([Residual(), Residual()])
        self.register_buffer("scale", torch.arange(8.0) + 1, persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.into(inputs) + self.out(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return (hidden * self.scale)[:, :CLASSES]


def made_where(
    session: Session, model: type[nn.Module]
) -> tuple[list[str], dict[str, Tensor], dict[str, Tensor], float]:
    devices = []

    def make() -> nn.Module:
        devices.append(torch.empty(()).device.type)
        torch.manual_seed(3 + 10 * session.rank)  # only rank 0's counts
        return model()

    strategy = built("fsdp", session, make)
    first = snapshot(strategy)
    buffers = {name: value for name, value in strategy.live_state().items() if name.startswith("buffers/")}
    return devices, first, buffers, strategy.step(part(strategy.share, 0), 0.0).loss.item()


def expect_rank_0s(ranks: list[Any], model: nn.Module) -> None:
    inputs, targets = global_batch(0)
    loss = nn.functional.cross_entropy(model(inputs), targets).item()
    assert sum(rank[3] for rank in ranks) == pytest.approx(loss, rel=1e-6)
    for _, first, buffers, _ in ranks:
        for name, value in model.state_dict().items():
            assert torch.equal(first[f"model/{name}"], value), name
        for name, value in model.named_buffers():
            assert torch.equal(buffers[f"buffers/{name}"], value), name


def test_rank_0_alone_makes_the_model_and_the_first_weights_are_bit_for_bit_its() -> None:
    ranks = run_ranks(3, made_where, Tied)
    torch.manual_seed(3)
    expect_rank_0s(ranks, Tied())
    assert [rank[0] for rank in ranks] == [["cpu"], ["meta"], ["meta"]]


class NeedsValues(nn.Module):
    """Its constructor reads a tensor, which has no values on ``meta``."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = torch.linspace(0, 1, 3)[1].item()
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(inputs) * self.slope


class HasStray(nn.Module):
    """A tensor that is no buffer would stay on ``meta``."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = torch.ones(CLASSES) * 2
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(inputs) * self.slope


@pytest.mark.parametrize("model", [NeedsValues, HasStray])
def test_a_model_that_needs_memory_is_made_on_every_rank_and_starts_as_rank_0s(
    model: type[nn.Module],
) -> None:
    ranks = run_ranks(2, made_where, model)
    torch.manual_seed(3)
    expect_rank_0s(ranks, model())
    assert [rank[0] for rank in ranks] == [["cpu"], ["meta", "cpu"]]


def cut_on_one_rank(session: Session) -> object:
    strategy = built("fsdp", session)
    return evaluate(strategy, eval_parts(strategy.share, 60, 4), 60, classification, lambda: session.rank == 1)


def test_an_evaluation_that_is_cut_on_one_rank_ends_on_all_and_counts_for_nothing() -> None:
    assert run_ranks(3, cut_on_one_rank) == [None] * 3


def evaluate_between(session: Session, between: bool) -> list[dict[str, Tensor]]:
    """Return the states of some steps. Weights that an evaluation gathers must not reach a step or a save."""
    states = []
    strategy = built("zero", session, criterion=token_loss, accumulate=2)
    for step in range(3):
        if between:
            before = {name: value.clone() for name, value in strategy.live_state().items()}
            evaluate(strategy, eval_parts(strategy.share, 10, 2), 10, classification)
            trainer.assert_same(before, strategy.live_state())
        states.append(snapshot(strategy))
        strategy.step(part(strategy.share, step), rates(step))
    return states


def test_an_evaluation_changes_neither_what_is_saved_nor_what_follows() -> None:
    with_it, without = (run_ranks(2, evaluate_between, between)[0] for between in (True, False))
    for one, other in zip(with_it, without, strict=True):
        trainer.assert_same(one, other)
    assert any(not torch.equal(without[0][name], without[2][name]) for name in without[0])


def test_a_run_killed_between_checkpoints_ends_bit_for_bit_like_the_undisturbed_one(tmp_path: Path) -> None:
    train = partial(trainer.train, name="fsdp")
    undisturbed = run_ranks(3, train, tmp_path / "whole")
    run_ranks(3, partial(trainer.die_after, name="fsdp"), tmp_path / "parts", 7)
    for mine, again in zip(undisturbed, run_ranks(3, train, tmp_path / "parts"), strict=True):
        assert again[0] == mine[0]
        trainer.assert_same(again[1], mine[1])
    losses = [trainer.logged(tmp_path / folder, "train/loss") for folder in ("whole", "parts")]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 10


def image_model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), Residual(), Residual(), nn.Linear(8, 5))


@pytest.mark.parametrize(
    "attempts",
    [
        [("fsdp", 4), ("fsdp", 2), ("fsdp", 3)],
        [("ddp", 2), ("fsdp", 3), ("zero", 2), ("ddp", 1)],
        [("hsdp", 4), ("tensor", 3), ("tensor x shards", 4), ("tensor x replicas", 4)],
    ],
    ids=["other ranks", "other strategies", "other meshes"],
)
def test_a_run_continues_alike_from_a_checkpoint_that_was_cut_otherwise(
    attempts: list[tuple[str, int]], tmp_path: Path
) -> None:
    config = replace(trainer.CONFIG, log_every=1)
    ((result, _),) = run_ranks(1, trainer.train, tmp_path / "whole", config, image_model)
    for number, (name, world_size) in enumerate(attempts, 1):
        steps = None if number == len(attempts) else 3 * number
        part_of_it = partial(trainer.train, name=name)
        ranks = run_ranks(world_size, part_of_it, tmp_path / "parts", replace(config, max_steps=steps), image_model)
    assert ranks[0][0].metrics == pytest.approx(result.metrics, abs=1e-5)
    losses = [trainer.logged(tmp_path / folder, "train/loss") for folder in ("whole", "parts")]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    assert len(losses[1]) == 10


def recomputed(session: Session, name: str) -> list[tuple[int, dict[str, Tensor]]]:
    """How often blocks ran in a step, and what came of some."""
    results = []
    for recomputes in (False, True):
        runs = [0]

        def count(module: nn.Module, inputs: Any, runs: list[int] = runs) -> None:
            runs[0] += 1

        def model(count: Callable[..., None] = count) -> nn.Module:
            made = plain_model()
            for block in (made[1], made[2]):  # type: ignore[index]
                block.into.register_forward_pre_hook(count)
            return made

        strategy = build_strategy(replace(SUBJECTS[name][0], activation_checkpointing=recomputes), session)
        strategy.build(
            model,
            lambda model: torch.optim.AdamW(model.parameters()),
            criterion_objective(cross_entropy),
            part(strategy.share, 0),
        )
        runs[0] = 0
        for step in range(3):
            strategy.step(part(strategy.share, step), rates(step))
        results.append((runs[0], snapshot(strategy)))
    return results


@pytest.mark.parametrize("name", SAMPLE)
def test_blocks_that_recompute_activations_run_twice_and_train_to_the_same_bits(name: str) -> None:
    ranks = run_ranks(SUBJECTS[name][1], recomputed, name)
    assert sum(once for (once, _), _ in ranks) >= 6  # a server, or a stage without blocks, runs none
    for (once, kept), (twice, again) in ranks:
        assert twice == 2 * once
        trainer.assert_same(again, kept)


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.heat = nn.Linear(FEATURES, CLASSES), nn.Parameter(torch.tensor(1.0))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(inputs) * self.heat


def shares_weights() -> nn.Module:
    one, two = Residual(), Residual()
    two.into.weight = one.into.weight
    return nn.Sequential(nn.Linear(FEATURES, 8), one, two, nn.Linear(8, CLASSES))


def with_batch_norm() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(FEATURES)) for _ in range(2)]
    return nn.Sequential(*blocks, nn.Linear(FEATURES, CLASSES))


def refusal(session: Session, model: Any, config: StrategyConfig, precision: str) -> str:
    strategy = build_strategy(config, session, TrainConfig(precision=precision))
    return refused_with(
        lambda: strategy.build(
            model,
            lambda m: torch.optim.SGD(m.parameters()),
            criterion_objective(cross_entropy),
            part(strategy.share, 0),
        )
    )


@pytest.mark.parametrize(
    ("model", "config", "precision", "says"),
    [
        (Scalar, StrategyConfig("fsdp"), "fp32", "strategy.name: heat has no dimension to cut"),
        (
            shares_weights,
            StrategyConfig("zero"),
            "fp32",
            "strategy.name: blocks of this model share parameters (1.into.w",
        ),
        (with_batch_norm, StrategyConfig("fsdp"), "bf16", "train.precision: 0.1, 1.1 keeps statistics in fp32"),
        (Scalar, StrategyConfig("ddp", activation_checkpointing=True), "fp32", "this model repeats no block"),
        (
            with_batch_norm,
            StrategyConfig("fsdp", activation_checkpointing=True),
            "fp32",
            "strategy.activation_checkpointing: 0.1 would count each batch twice",
        ),
    ],
    ids=["scalar", "shared", "batch norm in bf16", "no blocks", "batch norm"],
)
def test_what_does_not_go_together_is_refused_with_the_key_and_the_layer(
    model: Any, config: StrategyConfig, precision: str, says: str
) -> None:
    assert all(says in message for message in run_ranks(2, refusal, model, config, precision))
