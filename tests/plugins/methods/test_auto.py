"""What auto measures and picks, with given memory figures."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from toolkit.base.errors import ConfigError
from toolkit.config import load_config, validate
from toolkit.plugins.methods.auto import ROOM, Size, measure, memory_bytes, needs, pick

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
