"""Pruning beside numpy, and as a part of a step."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.strategies.test_steps import refusal
from toolkit.config import PruningConfig, TrainConfig
from toolkit.plugins.methods.pruning import Pruning, target_sparsity
from toolkit.strategies.update import OptimizerWrapper


def test_the_amount_follows_zhu_and_gupta_in_stairs_and_stays_at_the_end() -> None:
    config = PruningConfig(0.8, start_step=10, end_step=45, every_steps=10)
    curve = {step: 0.8 - 0.8 * (1 - (step - 10) / 35) ** 3 for step in (10, 20, 30, 40)}
    expected = {9: 0.0, 10: 0.0, 19: 0.0, 20: curve[20], 29: curve[20], 30: curve[30], 44: curve[40], 45: 0.8, 99: 0.8}
    assert {step: target_sparsity(config, step) for step in expected} == pytest.approx(expected)
    assert target_sparsity(PruningConfig(0.5, start_step=7, end_step=7), 7) == 0.5


@pytest.mark.parametrize("amount", [0.01, 0.5, 0.999])
def test_the_threshold_is_numpys_nth_smallest_magnitude(amount: float) -> None:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Conv2d(2, 7, 3), nn.Linear(9, 31))
    with torch.no_grad():
        model.get_parameter("0.weight").mul_(1e-20)  # subnormal in part
        model.get_parameter("1.weight").mul_(1e20)
    weights = [model.get_parameter("0.weight"), model.get_parameter("1.weight")]
    values = np.concatenate([weight.detach().abs().flatten().numpy() for weight in weights])
    last = np.sort(values)[round(amount * values.size) - 1]
    pruning = Pruning(model, PruningConfig(amount, start_step=1, end_step=1), None)
    pruning.after_step()
    left = np.concatenate([weight.detach().abs().flatten().numpy() for weight in weights])
    np.testing.assert_array_equal(left, np.where(values <= last, 0.0, values))


def test_a_rollback_prunes_at_once_what_the_step_is_due() -> None:
    model = nn.Linear(50, 20)
    pruning = Pruning(model, PruningConfig(0.6, start_step=1, end_step=5, every_steps=2), None)
    for _ in range(5):
        pruning.after_step()
    assert pruning.sparsity() == pytest.approx(0.6)
    for name, entry in pruning.state().items():
        if name != "mask/level":
            entry.value.fill_(True)  # type: ignore[union-attr]
    pruning.on_loaded({"mask/level": 0.0, "step": 7})
    nn.init.normal_(model.weight)
    pruning.after_step()
    assert pruning.sparsity() == pytest.approx(0.6)


def test_a_model_without_layers_to_prune_is_refused() -> None:
    once = PruningConfig(0.5, end_step=1)
    assert "no linear or convolutional layer to prune" in refusal(nn.Embedding(3, 3), pruning=once)
    whole = PruningConfig(0.5, structured=True, end_step=1)
    assert "no linear or convolutional layer besides its last one" in refusal(nn.Linear(2, 2), pruning=whole)


class NoReading(TorchDispatchMode):
    """Fails where the host reads a value. On a GPU the host would have to wait for it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("structured", [False, True])
def test_no_part_of_a_step_makes_the_host_wait_for_the_device(optimizer: Any, structured: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    options = {"momentum": 0.9} if optimizer is torch.optim.SGD else {}
    pruning = PruningConfig(0.5, structured=structured, start_step=1, end_step=9, every_steps=2)
    bad: dict[str, Any]
    bad = {"skip_bad_steps": True, "spike_factor": 3.0, "precision": "fp16", "clip_norm": 1.0, "ema_decay": 0.9}
    made = optimizer(model.parameters(), 0.1, fused=True, **options)
    update = OptimizerWrapper(model, made, TrainConfig(**bad, pruning=pruning))
    for step in range(10):
        update.begin()
        update.scaled(model(torch.full((3, 4), torch.nan if step == 4 else 1.0)).sum()).backward()
        with NoReading():
            update.apply(0.1)
    assert update.step_metrics()["train/sparsity"] > 0.3
    assert all(weight.isfinite().all() for weight in model.state_dict().values())
