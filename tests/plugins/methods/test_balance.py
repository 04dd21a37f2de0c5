"""The shares follow the ranks' speeds, by the clock of a fake machine."""

import json
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.unit.data.samples import Numbers
from toolkit.base.errors import ConfigError
from toolkit.config import DataConfig, load_config, validate
from toolkit.data.loader import Loader, build_loader
from toolkit.plugins.methods.auto import ROOM, Size, measure, memory_bytes, needs, pick
from toolkit.plugins.methods.balance import Balance, build_balance, shares
from toolkit.ranks.batch import Share


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=9), st.integers(1, 500))
def test_shares_tile_the_batch_within_the_bounds_and_the_faster_never_has_less(speeds: list[float], size: int) -> None:
    ranks = len(speeds)
    least, most = size // (2 * ranks), max(3 * size // (2 * ranks), -(-size // ranks))
    found = shares(speeds, size, least, most)
    assert sum(found) == size
    assert all(least <= count <= most for count in found)
    for i, j in np.ndindex(ranks, ranks):
        if speeds[i] > speeds[j] * (1 + 1e-9):  # closer ones are equal when the shares are rounded
            assert found[i] >= found[j]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(8, 12), min_size=2, max_size=9), st.integers(20, 400))
def test_within_the_bounds_shares_are_those_of_the_largest_remainder(speeds: list[int], size: int) -> None:
    """Speeds that differ by little meet no bound. The oracle is Hamilton's method in whole numbers."""
    total = sum(speeds)
    quotas = [divmod(speed * size, total) for speed in speeds]
    expected = [whole for whole, _ in quotas]
    by_remainder = sorted(range(len(speeds)), key=lambda rank: (-quotas[rank][1], rank))
    left = size - sum(expected)
    for rank in by_remainder[:left]:
        expected[rank] += 1
    found = shares([float(speed) for speed in speeds], size, 0, size)
    remainders = [quotas[rank][1] for rank in by_remainder]
    if 0 < left < len(speeds) and remainders[left - 1] == remainders[left]:
        assert sorted(found) == sorted(expected) or max(np.abs(np.subtract(found, expected))) == 1  # a tie in floats
    else:
        assert found == expected


class Recording(Loader):
    """A loader that notes the cuts."""

    def __init__(self, size: int, ahead: int = 0) -> None:
        self.global_batch_size, self.ahead, self.balances = size, ahead, True
        self.cuts: list[tuple[int, list[int]]] = []

    def rebalance(self, step: int, counts: Sequence[int]) -> None:
        self.cuts.append((step, [*counts]))


def simulate(balance: Balance, loader: Recording, per_sample_s: list[float], steps: int, every: int = 10) -> list[int]:
    """Return the shares after these steps. Each rank takes ``per_sample_s`` for a sample, and a little for a step."""
    ranks = len(per_sample_s)
    counts = [stop - start for start, stop in (Share(r, ranks).bounds(loader.global_batch_size) for r in range(ranks))]
    for step in range(every, steps + 1, every):
        counts = next((found for first, found in reversed(loader.cuts) if first <= step - every), counts)
        balance.update(step, [0.001 + n * s for n, s in zip(counts, per_sample_s, strict=True)])
    return loader.cuts[-1][1] if loader.cuts else counts


def test_a_rank_of_two_thirds_of_the_speed_gets_two_thirds_of_the_others_samples() -> None:
    loader = Recording(64)
    found = simulate(Balance(loader, 4, 1), loader, [0.01, 0.015, 0.01, 0.01], 200)
    assert sum(found) == 64
    assert found[1] == pytest.approx(64 * (2 / 3) / (3 + 2 / 3), abs=1)
    assert len(loader.cuts) < 6, "they settle"


def test_no_share_falls_below_half_an_even_one_or_below_what_is_accumulated() -> None:
    loader = Recording(64)
    assert min(simulate(Balance(loader, 4, 1), loader, [0.01, 1.0, 0.01, 0.01], 200)) == 8
    loader = Recording(64)
    assert min(simulate(Balance(loader, 4, 12), loader, [0.01, 1.0, 0.01, 0.01], 200)) == 12


def test_equal_ranks_keep_even_shares_though_their_times_jitter() -> None:
    loader, draw = Recording(64), np.random.default_rng(0)
    balance = Balance(loader, 4, 1)
    for step in range(10, 400, 10):
        balance.update(step, (0.01 * draw.uniform(0.99, 1.01, 4)).tolist())
    assert loader.cuts == []


def test_a_share_moves_only_after_all_batches_of_the_old_one_and_a_pure_window() -> None:
    loader = Recording(64, ahead=8)
    balance = Balance(loader, 2, 1)
    assert balance.update(5, [1.0, 9.0]) == {"world_share/rank_0": 32, "world_share/rank_1": 32}
    assert loader.cuts == [], "caches are cold in the first window"
    balance.update(10, [1.0, 2.0])
    assert [first for first, _ in loader.cuts] == [18]
    counts = loader.cuts[0][1]
    balance.update(15, [1.0, 2.0])  # by the old shares still
    balance.update(20, [1.0, 2.0])  # by both
    assert len(loader.cuts) == 1
    assert balance.update(25, [1.0, 1.0])["world_share/rank_1"] == counts[1]


def test_a_resume_on_as_many_ranks_keeps_the_current_and_the_agreed_shares() -> None:
    loader = Recording(64, ahead=8)
    balance = Balance(loader, 2, 1)
    balance.update(5, [1.0, 1.0])
    balance.update(10, [1.0, 2.0])
    saved = json.loads(json.dumps(balance.state()))
    again = Recording(64, ahead=8)
    resumed = Balance(again, 2, 1)
    resumed.restore(saved)
    assert again.cuts == [(0, [32, 32]), *loader.cuts]
    assert json.loads(json.dumps(resumed.state())) == saved
    others = Recording(64)
    Balance(others, 4, 1).restore(saved)
    Balance(others, 2, 1).restore(None)
    assert others.cuts == []


def test_shares_too_small_for_the_passes_of_accumulation_are_not_taken_over() -> None:
    saved = {"cuts": [[0, [24, 40]]], "speeds": [1.0, 2.0]}
    loader = Recording(64)
    Balance(loader, 2, 25).restore(saved)
    assert loader.cuts == []
    Balance(loader, 2, 24).restore(saved)
    assert loader.cuts == [(0, [24, 40])]


def test_shares_by_speed_are_asked_for_and_not_for_ranks_that_share_samples() -> None:
    assert not build_loader(Numbers(9), DataConfig(global_batch_size=4), Share(0, 2), seed=0).balances
    loader = build_loader(Numbers(9), DataConfig(global_batch_size=4, balance="auto"), Share(0, 2), seed=0)
    assert isinstance(build_balance(loader, Share(0, 2), 2, 1), Balance)
    with pytest.raises(ConfigError, match="4 ranks have 2"):
        build_balance(loader, Share(0, 2), 4, 1)


GIB = 2**30
#: 10 GiB of weights in 10 blocks with AdamW.
LARGE = Size(weights=10 * GIB, gradients=10 * GIB, slots=20 * GIB, block=GIB, rest=0)


def fits(size_gib: float) -> int:
    """Return the memory, in bytes, that ``size_gib`` fill as far as is allowed."""
    return int(size_gib * GIB / (1 - ROOM)) + 1


@pytest.mark.parametrize(
    ("ranks", "memory", "more", "expected"),
    [
        (4, fits(40), {}, "ddp"),
        (4, fits(39), {}, "zero"),
        (4, fits(20), {}, "zero"),  # a quarter of 40, and the gathered weights
        (4, fits(19), {}, "fsdp"),
        (4, fits(15), {"bf16": True}, "zero"),  # which are gathered in half the width
        (4, fits(20), {"accumulates": True}, "fsdp"),  # gradients are whole until the last part
        (4, fits(1), {}, "fsdp"),
        (1, fits(1), {}, "ddp"),
    ],
)
def test_the_first_strategy_that_leaves_room_is_taken(
    ranks: int, memory: int, more: dict[str, Any], expected: str
) -> None:
    assert pick(LARGE, ranks, memory, **more)[0] == expected


def test_the_reason_gives_the_figures_and_what_to_do_where_nothing_fits() -> None:
    _, why = pick(LARGE, 4, fits(39))
    assert why == (
        "10 GiB weights + 10 GiB gradients + 20 GiB slots; a rank would keep: ddp 40 GiB, zero 20 GiB, fsdp 12 GiB; "
        "39 GiB of its 65 GiB may be filled so"
    )
    assert "activation_checkpointing" in pick(LARGE, 4, fits(13))[1]
    assert "more than there is" in pick(LARGE, 4, fits(1))[1]


def test_needs_of_many_ranks_are_a_part_of_the_state_and_what_is_gathered() -> None:
    found = needs(LARGE, 1000)
    assert found["zero"] == pytest.approx(10.04 * GIB)
    assert found["fsdp"] == pytest.approx(2.04 * GIB)


def model() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]
    made = nn.Sequential(nn.Linear(4, 8), nn.ModuleList(blocks), nn.Linear(8, 2))
    made[2].weight.requires_grad_(False)
    random.random(), np.random.rand()
    return made


@pytest.mark.parametrize("slots", [1, 2])
def test_bytes_are_those_of_a_real_model_and_a_real_step(slots: int) -> None:
    def optimizer(made: nn.Module) -> torch.optim.Optimizer:
        trained = [parameter for parameter in made.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained) if slots == 2 else torch.optim.SGD(trained, 0.1, momentum=0.9)

    real = model()
    stepper = optimizer(real)
    for parameter in real.parameters():
        parameter.grad = torch.ones_like(parameter)
    stepper.step()
    kept = sum(v.nbytes for state in stepper.state.values() for v in state.values() if isinstance(v, torch.Tensor))
    weights, frozen, block = 4 * (40 + 3 * 72 + 18), 4 * 16, 4 * 72
    assert measure(model, optimizer) == Size(weights, weights - frozen, kept, block, weights - 3 * block)


def test_a_model_that_was_measured_is_made_with_the_same_values() -> None:
    def drawn() -> tuple[torch.Tensor, float, float]:
        return torch.rand(1), random.random(), np.random.rand()

    def seed() -> None:
        torch.manual_seed(5), random.seed(5), np.random.seed(5)

    seed()
    expected = drawn()
    seed()
    measure(model, lambda made: torch.optim.SGD(made.parameters(), 0.1))
    assert drawn() == expected


def test_an_optimizer_that_needs_values_is_taken_to_keep_two_for_each_weight() -> None:
    def optimizer(made: nn.Module) -> torch.optim.Optimizer:
        if next(made.parameters()).sum().item() > 0:
            raise AssertionError
        return torch.optim.SGD(made.parameters(), 0.1)

    found = measure(model, optimizer)
    assert found.slots == 2 * found.gradients


def test_ranks_of_a_node_share_its_memory() -> None:
    cpu = torch.device("cpu")
    assert memory_bytes(cpu, {"LOCAL_WORLD_SIZE": "4"}) == memory_bytes(cpu, {}) // 4


def test_a_mesh_is_refused_for_it_makes_its_own() -> None:
    with pytest.raises(ConfigError, match=r"strategy\.mesh: auto lays out the ranks itself"):
        validate(load_config("configs/digits_ddp.yaml", ["strategy.name=auto", "strategy.mesh.replicas=2"], site=False))
