"""Muon beside AdamW, against torch's own of both."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from tests.unit.train.test_optim import Language, settings_of
from toolkit.base.errors import ConfigError
from toolkit.config import OptimConfig, load_config, validate
from toolkit.train.optim import build_optimizer


def of_muon(model: nn.Module, **options: Any) -> set[str]:
    chosen = settings_of(build_optimizer(OptimConfig("muon", **options), model), model, "muon")
    return {name for name, is_muons in chosen.items() if is_muons}


HIDDEN = {f"blocks.{n}.{m}.weight" for n in "01" for m in "02"}


@pytest.mark.parametrize("tied", [True, False])
def test_muon_takes_hidden_matrices_and_leaves_embeddings_head_norms_and_biases(tied: bool) -> None:
    assert of_muon(Language(tied=tied)) == HIDDEN


def test_a_pattern_says_which_of_the_two_a_parameter_is_for() -> None:
    groups: Any = {"blocks.*": {"optimizer": "adamw"}, "blocks.1.2.weight": {"optimizer": "muon"}}
    groups["head.weight"] = {"optimizer": "muon"}
    assert of_muon(Language(), groups=groups) == {"blocks.1.2.weight", "head.weight"}
    with pytest.raises(ConfigError, match=r"optim\.groups: head\.bias has the shape \(5,\), and muon takes matrices"):
        of_muon(Language(), groups={"head.*": {"optimizer": "muon"}})
    with pytest.raises(ConfigError, match=r"optim\.name: muon is for weights of two dimensions.*use adamw"):
        of_muon(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(2, 2)))
    with pytest.raises(ConfigError, match=r"optim\.arguments: torch's Muon does not take"):
        of_muon(Language(), arguments={"ns_coefficient": 1})


def steps_of(model: nn.Module, step: Callable[[int], object], count: int = 4) -> dict[str, Tensor]:
    for n in range(count):
        tokens = torch.randint(5, (7, 3), generator=torch.Generator().manual_seed(n))
        model.zero_grad()
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        step(n)
    return dict(model.named_parameters())


def test_muon_makes_the_steps_of_torchs_muon_and_adamw_bit_for_bit() -> None:
    arguments: Any = {"adjust_lr_fn": "original", "ns_steps": 3}
    config = OptimConfig("muon", arguments, lr=0.02, weight_decay=0.1, momentum=0.8, nesterov=False, betas=[0.8, 0.9])
    ours, model = Language(), Language()
    optimizer = build_optimizer(config, ours)
    made = steps_of(ours, lambda _: optimizer.step())
    hidden = [parameter for name, parameter in model.named_parameters() if name in HIDDEN]
    others = [parameter for name, parameter in model.named_parameters() if name not in HIDDEN]
    pair: list[Any] = [
        torch.optim.Muon(hidden, 0.02, weight_decay=0.1, momentum=0.8, nesterov=False, **arguments),
        AdamW(others, 0.02, betas=(0.8, 0.9), weight_decay=0.1, fused=True),
    ]
    expected = steps_of(model, lambda _: [each.step() for each in pair] and None)
    assert [name for name in made if not torch.equal(made[name], expected[name])] == []


def test_hooks_of_muon_are_called_once_a_step_beside_another_optimizer() -> None:
    AdamW([torch.zeros(1)])  # from then on torch calls the hooks of AdamW's own step, too
    calls: list[str] = []
    model = Language()
    optimizer = build_optimizer(OptimConfig("muon"), model)
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    steps_of(model, lambda _: optimizer.step(), count=2)
    assert calls == ["before", "after"] * 2


def test_muon_leaves_out_a_step_on_the_device_as_torchs_fused_adamw_does() -> None:
    optimizers: list[Any] = []

    def run(steps: list[int]) -> dict[str, Tensor]:
        model = Language()
        optimizers.append(build_optimizer(OptimConfig("muon", lr=0.02), model))

        def step(n: int) -> None:
            if n not in steps:
                for parameter in model.parameters():
                    parameter.grad = torch.full_like(parameter, torch.nan)
            # torch's GradScaler sets it, and a fused optimizer reads it without waiting for the GPU
            optimizers[-1].found_inf = torch.tensor(float(n not in steps))
            optimizers[-1].step()

        return steps_of(model, step) if steps else {}

    left_out = run([1, 3])
    model = Language()
    optimizer = build_optimizer(OptimConfig("muon", lr=0.02), model)
    expected = steps_of(model, lambda n: optimizer.step() if n in (1, 3) else None)
    assert [name for name in left_out if not torch.allclose(left_out[name], expected[name], atol=0, rtol=0)] == []


def test_a_group_that_is_added_later_is_adamws() -> None:
    optimizer = build_optimizer(OptimConfig("muon", lr=0.1), Language())
    temperature = nn.Parameter(torch.ones(2, 2))  # of a criterion that learns
    optimizer.add_param_group({"params": [temperature]})
    temperature.grad = torch.ones(2, 2)
    optimizer.step()
    assert {*optimizer.state[temperature]} == {"step", "exp_avg", "exp_avg_sq"}
    assert torch.allclose(temperature, torch.full((2, 2), 0.9))


def test_a_group_may_name_its_optimizer() -> None:
    optim = "{name: muon, nesterov: false, groups: {head.*: {optimizer: muon, lr_scale: 10, weight_decay: 0}}}"
    validate(load_config(None, [f"optim={optim}"]))
