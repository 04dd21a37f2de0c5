"""Gradient compression: each scheme beside its own arithmetic in numpy, nothing lost, resumes, layers, accuracy."""

import logging
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn

from tests.dist.objectives import classification, cross_entropy
from tests.dist.ranks import run_ranks, told_by_us
from tests.dist.strategy_cases import (
    CASES,
    CLASSES,
    FEATURES,
    OPTIMIZERS,
    STEPS,
    global_batch,
    oracle,
    part,
    plain_model,
    rates,
    snapshot,
    token_loss,
)
from tests.unit.checkpoint.ranks import tensor_of
from toolkit.base.errors import ConfigError
from toolkit.checkpoint.folder import CheckpointFolder
from toolkit.checkpoint.reader import load
from toolkit.checkpoint.writer import save
from toolkit.config import DataConfig, StrategyConfig, TrainConfig
from toolkit.data.datasets import build_datasets
from toolkit.data.loader import build_loader, eval_batches
from toolkit.plugins.methods.compression_schemes import BLOCK, MeteredCollectives, Piece, build_scheme
from toolkit.ranks.batch import Batch, Share
from toolkit.ranks.session import Session
from toolkit.strategies import Strategy, build_strategy, criterion_objective
from toolkit.train.evaluate import evaluate

pytestmark = [pytest.mark.dist, pytest.mark.sample(12)]

Array = npt.NDArray[np.float32]
KINDS = ("fp16", "bf16", "int8", "topk", "powersgd")
RANKS, ROUNDS = 3, 3
SHAPES = ((24, 20), (16, 3, 4, 4), (30, 6))
SCALES = (1e-8, 1.0, 1e6)  #: the first are nothing in fp16, the last infinite
SIZE = sum(math.prod(shape) for shape in SHAPES)
#: int8 works on whole blocks of every rank.
PADDED = -(-SIZE // (BLOCK * RANKS)) * BLOCK * RANKS
AMOUNTS = {"topk": 0.03, "powersgd": 2.0}


def gradient(rank: int, step: int) -> Array:
    """Small ones beside large ones, as layers have them."""
    draw = np.random.default_rng((rank, step))
    scales = np.repeat(SCALES, [math.prod(shape) for shape in SHAPES])
    return (draw.standard_normal(SIZE) * scales).astype(np.float32)


def pieces(kind: str) -> list[Piece]:
    starts = np.cumsum([0, *(math.prod(shape) for shape in SHAPES)])
    amount = AMOUNTS.get(kind, 1.0)
    return [
        Piece(f"p{i}", shape, int(start), amount)
        for i, (shape, start) in enumerate(zip(SHAPES, starts[:-1], strict=True))
    ]


def exchanges(session: Session) -> dict[str, Any]:
    """Return for each scheme and round: input, mean, and remainder. Also return the factors at the start."""
    found: dict[str, Any] = {}
    for kind in KINDS:
        scheme = build_scheme(kind, pieces(kind), MeteredCollectives(), session.device)
        found[f"{kind} before"] = {name: tensor_of(entry).clone() for name, entry in scheme.state().items()}
        left = torch.zeros(-(-SIZE // scheme.multiple) * scheme.multiple)
        for step in range(ROUNDS):
            given = torch.zeros_like(left)
            given[:SIZE] = torch.from_numpy(gradient(session.rank, step))
            values = given + left if scheme.feeds_back else given.clone()
            before = values.clone()
            mean = scheme.average(values)
            left = values
            found[f"{kind} {step}"] = [x.double().numpy() for x in (before, mean, values)]
    return found


@pytest.fixture(scope="module")
def exchanged() -> list[dict[str, Any]]:
    return run_ranks(RANKS, exchanges)


def rounds(exchanged: list[dict[str, Any]], kind: str, step: int) -> tuple[Any, Any, Any]:
    """Return ``(given (ranks, n), mean (n,), left (ranks, n))``. Assert that all ranks have the same mean."""
    found = [rank[f"{kind} {step}"] for rank in exchanged]
    assert all(np.array_equal(mean, found[0][1]) for _, mean, _ in found), "the replicas would drift apart"
    return np.stack([given for given, _, _ in found]), found[0][1], np.stack([left for _, _, left in found])


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_sent_and_what_is_left_add_up_to_what_was_given(exchanged: list[dict[str, Any]], kind: str) -> None:
    for step in range(ROUNDS):
        given, mean, left = rounds(exchanged, kind, step)
        missing = np.abs(mean + left.mean(axis=0) - given.mean(axis=0))
        for piece in pieces(kind):
            place = slice(piece.start, piece.start + piece.numel)
            assert missing[place].max() <= 1e-6 * np.abs(given[:, place]).max(), (step, piece.name)


@pytest.mark.parametrize("kind", ["int8", "topk", "powersgd"])
def test_over_all_steps_nothing_of_the_gradients_is_lost(exchanged: list[dict[str, Any]], kind: str) -> None:
    sent = sum(rounds(exchanged, kind, step)[1][:SIZE] for step in range(ROUNDS))
    left = rounds(exchanged, kind, ROUNDS - 1)[2][:, :SIZE].mean(axis=0)
    total: Any = sum(gradient(rank, step).astype(float) for rank in range(RANKS) for step in range(ROUNDS)) / RANKS
    for piece in pieces(kind):
        place = slice(piece.start, piece.start + piece.numel)
        assert np.allclose((sent + left)[place], total[place], rtol=0, atol=np.abs(total[place]).max() * 1e-5)


def test_bf16_is_the_rounded_mean_of_rounded_gradients(exchanged: list[dict[str, Any]]) -> None:
    given, mean, _ = rounds(exchanged, "bf16", 0)
    rounded = torch.from_numpy(given).float().bfloat16().float()
    assert np.array_equal(mean, (rounded.sum(0) / RANKS).bfloat16().double().numpy())


def test_fp16_neither_overflows_nor_loses_small_gradients(exchanged: list[dict[str, Any]]) -> None:
    given, mean, _ = rounds(exchanged, "fp16", 0)
    assert np.abs(given).max() > 65504
    assert np.abs(given[:, :BLOCK]).max() < 2**-24
    for block in range(0, SIZE, BLOCK):
        here = given[:, block : block + BLOCK]
        exact, bound = here.mean(axis=0), np.abs(here).max(axis=0) * 2**-10 + np.abs(here).max() * 2**-30
        assert (np.abs(mean[block : block + BLOCK] - exact) <= bound).all(), block


def test_int8_is_what_two_phases_of_blocks_of_255_steps_make(exchanged: list[dict[str, Any]]) -> None:
    given, mean, _ = rounds(exchanged, "int8", 1)
    assert given.shape[1] == PADDED

    def squeezed(values: Any) -> Any:
        blocks = values.reshape(-1, BLOCK)
        scale = np.maximum(np.abs(blocks).max(axis=1, keepdims=True) / 127, 1e-30)
        return (np.rint(blocks / scale) * scale).reshape(values.shape)

    expected = squeezed(squeezed(given).mean(axis=0))
    steps = np.repeat(np.abs(expected.reshape(-1, BLOCK)).max(axis=1) / 127, BLOCK)
    assert (np.abs(mean - expected) <= 1.001 * steps).all(), "by one step at most, where fp32 rounds to the other side"
    assert np.mean(np.abs(mean - expected) > 0.5 * steps) < 0.01


def test_top_k_is_the_mean_of_the_largest_values_of_each_parameter(exchanged: list[dict[str, Any]]) -> None:
    for step in range(ROUNDS):
        given, mean, _ = rounds(exchanged, "topk", step)
        expected = np.zeros(SIZE)
        for piece in pieces("topk"):
            for row in given:
                mine = row[piece.start : piece.start + piece.numel]
                chosen = np.argsort(-np.abs(mine))[: math.ceil(0.03 * piece.numel)]
                expected[piece.start + chosen] += mine[chosen] / RANKS
        assert np.allclose(mean, expected, rtol=1e-6, atol=0)


def test_powersgd_is_a_power_iteration_on_the_mean_that_goes_on_where_it_ended(exchanged: list[dict[str, Any]]) -> None:
    right = {
        piece.name: exchanged[0]["powersgd before"][f"powersgd/{piece.name}"].double().numpy()
        for piece in pieces("powersgd")
    }
    for step in range(ROUNDS):
        given, mean, _ = rounds(exchanged, "powersgd", step)
        for piece in pieces("powersgd"):
            place = slice(piece.start, piece.start + piece.numel)
            matrix = given[:, place].mean(axis=0).reshape(piece.shape[0], -1)
            side, _ = np.linalg.qr(matrix @ right[piece.name])
            right[piece.name] = matrix.T @ side
            product = (side @ right[piece.name].T).reshape(-1)
            assert np.linalg.norm(product - mean[place]) <= 1e-4 * np.linalg.norm(product), (step, piece.name)
            assert np.linalg.matrix_rank(mean[place].reshape(matrix.shape), tol=1e-4 * np.linalg.norm(product)) <= 2


def compressed(session: Session, kind: str, model: Callable[[], nn.Module] = plain_model, **more: Any) -> Strategy:
    options = {key: more.pop(key) for key in ("accumulate",) if key in more}
    optimizer, criterion, size = (
        more.pop("optimizer", "sgd"),
        more.pop("criterion", cross_entropy),
        more.pop("size", 10),
    )
    strategy = build_strategy(StrategyConfig("ddp", compression=kind, **more), session, TrainConfig(**options))
    strategy.build(model, OPTIMIZERS[optimizer], criterion_objective(criterion), part(strategy.share, 0, size))
    return strategy


def train_with_all_values(session: Session) -> list[tuple[list[float], dict[str, Tensor]]]:
    found = []
    for optimizer, criterion, accumulate, size in CASES:
        made = partial(compressed, session, "topk", optimizer=optimizer, criterion=criterion, size=size)
        strategy = made(accumulate=accumulate, compression_ratio=1.0)
        losses = [strategy.step(part(strategy.share, n, size), rates(n)).loss.item() for n in range(STEPS)]
        found.append((losses, snapshot(strategy)))
    return found


def test_top_k_of_all_values_takes_the_steps_of_one_process() -> None:
    ranks = run_ranks(3, train_with_all_values)
    for case, (optimizer, criterion, _, size) in enumerate(CASES):
        losses, weights = oracle(optimizer, criterion, size)
        assert np.allclose(np.sum([rank[case][0] for rank in ranks], axis=0), losses, atol=1e-6), CASES[case]
        for name, weight in weights.items():
            torch.testing.assert_close(ranks[0][case][1][f"model/{name}"], weight, atol=1e-6, rtol=0)


def one_layer() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(FEATURES, CLASSES, bias=False)


def train_weighted(session: Session) -> tuple[Any, Any]:
    made = partial(compressed, session, "topk", one_layer, optimizer="plain sgd", criterion=token_loss)
    strategy = made(compression_ratio=0.2)
    for step in range(STEPS):
        strategy.step(part(strategy.share, step), rates(step))
    found = snapshot(strategy)
    return found["model/weight"].numpy(), found[f"residual/rank{session.rank}/weight"].numpy()


def weighted_by_hand(ranks: int) -> tuple[Any, Any]:
    """Return the weights and each rank's residual, by hand. Of a weighted mean's gradient 20 % are sent."""
    weight = one_layer().weight.detach().double().numpy()  # type: ignore[operator]
    residual = np.zeros((ranks, *weight.shape))
    for step in range(STEPS):
        inputs, targets = (tensor.numpy() for tensor in global_batch(step))
        sent = np.zeros_like(weight)
        for rank in range(ranks):
            start, stop = Share(rank, ranks).bounds(len(inputs))
            x, tokens = inputs[start:stop].astype(float), targets[start:stop]
            powers = np.exp(x @ weight.T)
            errors = (powers / powers.sum(1, keepdims=True) - np.eye(CLASSES)[tokens]) * tokens[:, None]
            residual[rank] += errors.T @ x * ranks / targets.sum()
            flat = residual[rank].reshape(-1)
            largest = np.argsort(-np.abs(flat))[: math.ceil(0.2 * weight.size)]
            sent.reshape(-1)[largest] += flat[largest] / ranks
            flat[largest] = 0.0
        weight = weight - rates(step) * sent
    return weight, residual


def test_what_a_weighted_loss_leaves_for_later_is_sent_whole() -> None:
    weight, residual = weighted_by_hand(3)
    for rank, (trained, left) in enumerate(run_ranks(3, train_weighted)):
        assert np.allclose(left, residual[rank], atol=1e-6), np.abs(left).sum() / np.abs(residual[rank]).sum()
        assert np.allclose(trained, weight, atol=1e-6)


def train_with_average(session: Session) -> dict[str, Tensor]:
    strategy = compressed(session, "topk", optimizer="plain sgd", compression_ratio=1.0, compression_average=0.6)
    for step in range(STEPS):
        strategy.step(part(strategy.share, step), rates(step))
    return snapshot(strategy)


def test_with_all_values_sent_a_moving_average_is_momentum() -> None:
    model = plain_model()
    moving = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for step in range(STEPS):
        batch = part(Share(0, 1), step)
        model.zero_grad()
        nn.functional.cross_entropy(model(batch.inputs), batch.targets).backward()
        with torch.no_grad():
            for parameter, kept in zip(model.parameters(), moving, strict=True):
                kept.mul_(0.6).add_(parameter.grad, alpha=0.4)
                parameter.sub_(kept, alpha=rates(step))
    for found in run_ranks(3, train_with_average):
        for name, weight in model.state_dict().items():
            torch.testing.assert_close(found[f"model/{name}"], weight, atol=1e-6, rtol=0)


def own_state(strategy: Strategy) -> dict[str, Tensor]:
    kept = snapshot(strategy)
    return {name: value for name, value in kept.items() if name.startswith(("residual/", "moving/", "powersgd/"))}


def look_at_state(session: Session) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in ("int8", "topk", "powersgd"):
        strategy = compressed(session, kind, compression_rank=1, compression_average=0.5)
        made = own_state(strategy)
        strategy.step(part(strategy.share, 0), 0.1)
        before = own_state(strategy)
        batch = part(strategy.share, 1)
        if session.rank == 1:
            batch.inputs[0, 0] = torch.nan
        strategy.step(batch, 0.1)
        broken = bool(snapshot(strategy)["model/0.weight"].isnan().any())
        found[kind] = made, before, own_state(strategy), broken
    return found


def test_priming_and_gradients_that_are_not_finite_leave_nothing_for_later_steps() -> None:
    for rank, found in enumerate(run_ranks(2, look_at_state)):
        for kind, (made, before, after, broken) in found.items():
            for sort, count in ("residual", 6), ("moving", 12):  # of each matrix, and of each parameter
                own = [name for name in made if name.startswith(f"{sort}/rank{rank}/")]
                assert len(own) == len([name for name in made if sort in name]) == count
                assert not any(made[name].any() for name in own), kind
                assert any(before[name].any() for name in own), kind
            assert broken, "the update is not the compression's to withhold"
            assert all(torch.equal(after[name], before[name]) for name in before), kind


class Sometimes(nn.Module):
    """Leaves a layer out where the sum of its inputs is negative."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.always, self.at_times = nn.Linear(FEATURES, CLASSES), nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.always(inputs)
        return outputs + self.at_times(inputs) if inputs.sum() > 0 else outputs


def leave_out(session: Session) -> tuple[Tensor, Tensor]:
    strategy = build_strategy(StrategyConfig("ddp", compression="topk", compression_ratio=1.0), session)
    inputs = torch.ones(1, FEATURES)
    targets, place = torch.zeros(1, dtype=torch.long), torch.tensor([session.rank])
    strategy.build(Sometimes, OPTIMIZERS["sgd"], criterion_objective(cross_entropy), Batch((inputs, targets), place, 2))
    strategy.step(Batch((inputs if session.rank else -inputs, targets), place, 2), 1.0)
    return snapshot(strategy)["model/at_times.weight"], snapshot(strategy)["model/always.weight"]


def test_a_rank_whose_pass_did_without_a_layer_takes_part_with_zeros() -> None:
    one, other = run_ranks(2, leave_out)
    model = Sometimes()
    losses: Any = [
        nn.functional.cross_entropy(model(sign * torch.ones(1, FEATURES)), torch.zeros(1, dtype=torch.long))
        for sign in (-1, 1)
    ]
    (sum(losses) / 2).backward()
    stepper = OPTIMIZERS["sgd"](model)
    stepper.param_groups[0]["lr"] = 1.0
    stepper.step()
    for found in (one, other):
        torch.testing.assert_close(found[0], model.at_times.weight.detach())
        torch.testing.assert_close(found[1], model.always.weight.detach())


def train_and_save(session: Session, folder: Path, kind: str) -> dict[str, Tensor]:
    strategy = compressed(session, kind, compression_rank=1, compression_average=0.5)
    for step in range(3):
        strategy.step(part(strategy.share, step), 0.1)
    save(
        CheckpointFolder(folder),
        3,
        strategy.state(),
        {},
        rank=session.rank,
        world_size=session.world_size,
        kv=session.store,
    )
    return snapshot(strategy)


def resume(session: Session, folder: Path, kind: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    strategy = compressed(session, kind, compression_rank=1, compression_average=0.5)
    checkpoints = CheckpointFolder(folder)
    loaded = load(checkpoints, strategy.state(), rank=session.rank, world_size=session.world_size, kv=session.store)
    assert loaded.step == 3
    strategy.on_loaded(loaded.values)
    found = snapshot(strategy)
    strategy.step(part(strategy.share, 3), 0.1)
    return found, snapshot(strategy)


@pytest.mark.parametrize(("kind", "ranks"), [("powersgd", 2), ("topk", 4), ("int8", 1)])
def test_at_another_world_size_every_rank_starts_from_the_mean_of_what_was_left(
    tmp_path: Path, kind: str, ranks: int
) -> None:
    saved = run_ranks(3, train_and_save, tmp_path, kind)
    resumed = run_ranks(ranks, resume, tmp_path, kind)
    for rank, (found, stepped) in enumerate(resumed):
        left = [name for name in found if name.startswith(("residual/", "moving/"))]
        assert len(left) == 18
        for name in left:
            of_all = [saved[r][name.replace(f"rank{rank}", f"rank{r}")].double().numpy() for r in range(3)]
            assert np.allclose(found[name].numpy(), np.mean(of_all, axis=0), rtol=1e-6, atol=1e-12)
        shared = [name for name in found if name not in left]
        assert all(torch.equal(found[name], saved[0][name]) for name in shared)
        assert all(torch.equal(stepped[name], resumed[0][1][name]) for name in shared)


def count_bytes(session: Session) -> dict[str, dict[str, float | Tensor]]:
    layers = {"1.*": 0.5, "*.out.weight": "none"}
    made = {
        "topk": compressed(session, "topk", compression_ratio=0.1, compression_layers=layers),
        "powersgd": compressed(session, "powersgd", compression_rank=2, compression_layers={"3.weight": 1}),
        "bf16": compressed(session, "bf16"),
    }
    found = {}
    for kind, strategy in made.items():
        strategy.step(part(strategy.share, 0), 0.1)
        found[kind] = dict(strategy.step_metrics())
    return found


def test_the_figures_are_the_bytes_that_the_layers_make_and_the_error() -> None:
    shapes = {name: tuple(p.shape) for name, p in plain_model().named_parameters()}
    matrices = {name: shape for name, shape in shapes.items() if len(shape) == 2}
    vectors = 4 * sum(shape[0] for shape in shapes.values() if len(shape) == 1)
    plain = 4 * sum(math.prod(shape) for shape in shapes.values())
    for found in run_ranks(2, count_bytes):
        out = 4 * sum(math.prod(matrices[f"{n}.out.weight"]) for n in (1, 2))
        ratios = {name: 0.5 if name.startswith("1.") else 0.1 for name in matrices if ".out." not in name}
        chosen = 8 * sum(math.ceil(ratio * math.prod(matrices[name])) for name, ratio in ratios.items())
        assert found["topk"]["compression/sent_bytes"] == chosen + vectors + out  # 8: a value and its place
        ranks = {name: 1 if name == "3.weight" else 2 for name in matrices}
        factors = 4 * sum(ranks[name] * sum(shape) for name, shape in matrices.items())
        assert found["powersgd"]["compression/sent_bytes"] == factors + vectors
        blocks = math.ceil(plain / 4 / (2 * BLOCK)) * 2 * BLOCK
        assert found["bf16"]["compression/sent_bytes"] == 2 * blocks
        for kind, figures in found.items():
            assert figures["compression/plain_bytes"] == plain
            assert figures["compression/time_s"] > 0
            assert figures["compression/plain_time_s"] > 0
            low, high = (1e-4, 2**-8) if kind == "bf16" else (0.05, 1.0)
            assert low < figures["compression/error"] < high, kind


class DoublePrecision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.exact = nn.Linear(FEATURES, CLASSES, dtype=torch.float64)


def refusals(session: Session) -> list[str]:
    found = []
    for build in (
        partial(compressed, session, "topk", compression_layers={"blocks.*": 0.1}),
        partial(compressed, session, "int8", DoublePrecision),
    ):
        with pytest.raises(ConfigError) as caught:
            build()
        found.append(str(caught.value))
    return found


def test_an_unmatched_pattern_and_a_type_that_would_be_rounded_are_refused_by_name() -> None:
    for pattern, double in run_ranks(2, refusals):
        assert "strategy.compression_layers: 'blocks.*' matches no parameter; there are: 0.weight, 0.bias" in pattern
        assert "exact.weight (torch.float64)" in double


def judge(session: Session) -> list[str]:
    said = told_by_us()
    logging.getLogger("toolkit").setLevel(logging.INFO)
    strategy = compressed(session, "powersgd", compression_rank=1)
    for step in range(4):
        strategy.step(part(strategy.share, step), 0.1)
        if step % 2:
            strategy.step_metrics()
    return [line for line in said if "worth" in line]


def test_rank_0_says_once_whether_it_is_worth_it_on_this_link() -> None:
    mine, others = run_ranks(2, judge)
    assert len(mine) == 1
    assert not others
    assert "strategy.compression: powersgd sends" in mine[0]
    assert "worth it" in mine[0]


EPOCHS, GLOBAL_BATCH = 15, 64


def digits_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def train_on_digits(session: Session, kinds: dict[str, dict[str, Any]]) -> dict[str, float]:
    data = build_datasets(DataConfig("digits", global_batch_size=GLOBAL_BATCH))
    share = Share(session.rank, session.world_size)
    loader = build_loader(data.train, DataConfig("digits", global_batch_size=GLOBAL_BATCH), share, seed=0)
    batches = [loader.at(step) for step in range(EPOCHS * len(data.train) // GLOBAL_BATCH)]
    found = {}
    for kind, options in kinds.items():
        strategy = build_strategy(StrategyConfig("ddp", compression=kind, **options), session)
        optimizer = lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)  # noqa: E731
        strategy.build(digits_model, optimizer, criterion_objective(cross_entropy), batches[0])
        for step, batch in enumerate(batches):
            strategy.step(batch, 0.05 * (1 + math.cos(math.pi * step / len(batches))))
        figures = evaluate(strategy, eval_batches(data.eval, share, 256), len(data.eval), classification)
        found[kind] = figures["accuracy"]
    return found


def test_digits_are_learned_as_well_as_without_compression() -> None:
    kinds: dict[str, dict[str, Any]] = {"none": {}, "fp16": {}, "bf16": {}, "int8": {}}
    kinds |= {"topk": {"compression_ratio": 0.02}, "powersgd": {"compression_rank": 2}}
    found, _ = run_ranks(2, train_on_digits, kinds)
    assert found["none"] > 0.95
    assert min(found.values()) >= found["none"] - 0.01, found
