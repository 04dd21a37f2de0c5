import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR

from toolkit.base.errors import ConfigError
from toolkit.config import OptimConfig
from toolkit.config.learning_rate import build_schedule
from toolkit.train.optim import build_optimizer


def torch_rates(scheduler_class: type, steps: int, **options: float) -> list[float]:
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=0.4)
    scheduler = scheduler_class(optimizer, **options)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def rates(steps: int, total: int, **options: object) -> list[float]:
    schedule = build_schedule(OptimConfig(lr=0.4, **options), total)  # type: ignore[arg-type]
    return [schedule(step) for step in range(steps)]


def test_constant_stays() -> None:
    assert rates(5, 5, schedule="constant") == [0.4] * 5


def test_warm_up_rises_to_the_full_rate_and_the_rest_of_the_run_follows_the_schedule() -> None:
    warmed = rates(24, 24, schedule="cosine", warmup_steps=4)
    assert warmed[:4] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert warmed[4:] == pytest.approx(rates(20, 20, schedule="cosine"))


@pytest.mark.parametrize("least", [0.0, 0.1])
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_schedule_falls_to_the_minimum_as_torchs_does(schedule: str, least: float) -> None:
    options: dict[str, Any] = {"T_max": 20, "eta_min": least}
    if schedule == "linear":
        options = {"start_factor": 1.0, "end_factor": least / 0.4, "total_iters": 20}
    expected = torch_rates(CosineAnnealingLR if schedule == "cosine" else LinearLR, 20, **options)
    assert rates(23, 20, schedule=schedule, min_lr=least) == pytest.approx([*expected, *[least] * 3])


def test_wsd_is_stable_and_falls_in_its_last_steps_only() -> None:
    expected = [0.2, 0.4, 0.4, 0.4, 0.4, 0.4, 0.4, 0.3, 0.2, 0.1]
    assert rates(10, 10, schedule="wsd", warmup_steps=2, decay_steps=4, min_lr=0.0) == pytest.approx(expected)
    assert rates(10, 10, schedule="wsd", warmup_steps=2, min_lr=0.2)[7:] == pytest.approx([0.4, 0.4, 0.3])
    assert rates(6, 6, schedule="wsd", warmup_steps=4, decay_steps=9)[3:] == pytest.approx([0.4, 0.4, 0.2])


def test_a_warm_up_longer_than_the_run_is_no_division_by_zero() -> None:
    assert rates(3, 3, schedule="cosine", warmup_steps=5) == pytest.approx([0.08, 0.16, 0.24])


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_each_optimizer_is_torchs_own_and_leaves_frozen_parameters_out(name: str) -> None:
    model = nn.Linear(2, 3)
    model.bias.requires_grad_(False)
    optimizer = build_optimizer(OptimConfig(name, lr=0.3, momentum=0.5, weight_decay=0.1), model)
    assert type(optimizer).__name__.lower() == name
    assert optimizer.param_groups[0]["params"] == [model.weight]
    assert (optimizer.defaults["lr"], optimizer.defaults["weight_decay"]) == (0.3, 0.1)


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"optim\.name: unknown value 'adamv'; did you mean"):
        build_optimizer(OptimConfig("adamv"), nn.Linear(1, 1))
    with pytest.raises(ConfigError, match=r"optim\.schedule: unknown value 'cosin'; did you mean 'cosine'"):
        build_schedule(OptimConfig(schedule="cosin"), 10)


class Language(nn.Module):
    """A model with all that Muon and weight decay tell apart. The head is tied to the embedding, or not."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embed = nn.Embedding(5, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.LayerNorm((2, 4)), nn.Linear(8, 6)) for _ in "ab")
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(6, 5)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            assert isinstance(block, nn.Sequential)
            into, norm, out = block
            hidden = hidden + out(norm(into(hidden).unflatten(-1, (2, 4))).flatten(-2).tanh())
        return self.head(hidden * self.scale)


def settings_of(optimizer: Optimizer, model: nn.Module, setting: str) -> dict[str, Any]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[p]: group[setting] for group in optimizer.param_groups for p in group["params"]}


def test_a_parameter_has_each_setting_from_the_last_pattern_that_gives_it() -> None:
    model = Language()
    groups: dict[str, dict[str, Any]] = {
        "*.bias": {"weight_decay": 0, "lr_scale": 2},
        "head.*": {"lr_scale": 10},
        "blocks.0.*": {},
    }
    optimizer = build_optimizer(OptimConfig("adamw", lr=0.5, weight_decay=0.25, groups=groups), model)
    rates, decays = settings_of(optimizer, model, "lr"), settings_of(optimizer, model, "weight_decay")
    assert len(optimizer.param_groups) == 4
    assert [*rates] != [*dict(model.named_parameters())], "groups, in the order of their first parameters"
    assert {rates[f"blocks.{n}.{m}.weight"] for n in "01" for m in "02"} == {0.5}
    assert (rates["head.bias"], rates["head.weight"], rates["blocks.0.0.bias"]) == (5.0, 5.0, 1.0)
    assert (decays["head.bias"], decays["head.weight"], decays["blocks.1.2.bias"]) == (0, 0.25, 0)
    assert set(rates) == set(dict(model.named_parameters()))


def test_norms_biases_and_scalars_are_left_out_of_weight_decay_by_one_key() -> None:
    model = Language()
    config = OptimConfig(weight_decay=0.25, decay_norms_and_biases=False, groups={"scale": {"weight_decay": 0.5}})
    decays = settings_of(build_optimizer(config, model), model, "weight_decay")
    assert {name for name, decay in decays.items() if decay == 0.25} == {
        "embed.weight", "head.weight", *(f"blocks.{n}.{m}.weight" for n in "01" for m in "02"),
    }  # fmt: skip
    assert decays["scale"] == 0.5, "a pattern says more than the key"
    assert decays["blocks.0.1.weight"] == 0, "a norm's weight of two dimensions"


def test_without_groups_there_is_one_in_the_order_of_the_model() -> None:
    model = Language(tied=True)
    (group,) = build_optimizer(OptimConfig(), model).param_groups
    assert all(a is b for a, b in zip(group["params"], model.parameters(), strict=True))


def test_a_tied_parameter_answers_to_each_of_its_names_and_a_frozen_one_is_left_out() -> None:
    model = Language(tied=True)
    model.blocks.requires_grad_(False)
    groups: Any = {"head.weight": {"lr_scale": 3}, "blocks.*": {"lr_scale": 7}}
    optimizer = build_optimizer(OptimConfig(lr=0.5, groups=groups), model)
    assert settings_of(optimizer, model, "lr") == {"embed.weight": 1.5, "head.bias": 0.5, "scale": 0.5}


@pytest.mark.parametrize(
    ("pattern", "says"),
    [("haed.*", "did you mean 'head.*'? there are: scale, embed.weight"), ("Head.bias", "did you mean 'head.bias'?")],
)
def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest(pattern: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_optimizer(OptimConfig(groups={pattern: {"lr_scale": 2}}), Language())
    assert f"optim.groups: {pattern!r} matches no parameter of this model; " in str(caught.value)
    assert says in str(caught.value)


class Signs(SGD):
    """A user's own optimizer: SGD along the signs of the gradient."""

    def __init__(self, params: Any, lr: float, strength: float = 1.0) -> None:
        super().__init__(params, lr)
        self.defaults["strength"] = strength
        for group in self.param_groups:
            group.setdefault("strength", strength)


MINE = f"{__name__}.Signs"


def test_any_class_is_made_by_its_path_with_its_arguments_and_groups() -> None:
    model = Language()
    groups: Any = {"head.*": {"strength": 3.0, "lr_scale": 2}}
    optimizer = build_optimizer(OptimConfig(MINE, {"strength": 2.0}, lr=0.5, groups=groups), model)
    assert type(optimizer) is Signs
    strengths, rates = settings_of(optimizer, model, "strength"), settings_of(optimizer, model, "lr")
    assert (strengths["head.bias"], rates["head.bias"], strengths["scale"], rates["scale"]) == (3.0, 1.0, 2.0, 0.5)
    adamw = build_optimizer(OptimConfig("torch.optim.AdamW", {"betas": [0.5, 0.6]}, lr=0.5), model)
    assert type(adamw) is AdamW
    assert ([*adamw.defaults["betas"]], adamw.defaults["weight_decay"]) == ([0.5, 0.6], 0.0), (
        "the config's, not torch's"
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"name": "torch.optim.AdmW"},
            "optim.name: torch.optim.AdmW: the module torch.optim has no such class; did you mean 'AdamW'",
        ),
        ({"name": "torch.optim.lr_scheduler"}, "has lr_scheduler, which is not a torch.optim.Optimizer"),
        (
            {"name": "no.such.Module"},
            "optim.name: no.such.Module: the module no.such cannot be imported: ModuleNotFound",
        ),
        ({"name": "torch.optim.LBFGS"}, "optim.name: torch.optim.LBFGS computes the loss again in its step"),
        (
            {"name": "torch.optim.SGD", "arguments": {"x": 1}},
            "optim.arguments: torch.optim.SGD does not take lr=0.05, x=1",
        ),
        ({"name": MINE, "weight_decay": 0.1}, f"optim.arguments: {MINE} does not take lr=0.05, weight_decay=0.1"),
        ({"name": MINE, "groups": {"*": {"strenth": 1}}}, "no setting 'strenth' for a group; did you mean 'strength'"),
    ],
)
def test_a_class_that_cannot_be_had_or_made_is_refused_with_the_reason(options: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        build_optimizer(OptimConfig(**options), Language())


def test_the_keys_of_torchs_optimizers_reach_them() -> None:
    model = Language()
    defaults = build_optimizer(OptimConfig("adam", betas=[0.7, 0.8], eps=1e-3), model).defaults
    assert (defaults["betas"], defaults["eps"]) == ((0.7, 0.8), 1e-3)
    assert build_optimizer(OptimConfig("adam"), model).defaults["betas"] == Adam(model.parameters()).defaults["betas"]
    sgd = build_optimizer(OptimConfig(nesterov=True), model).defaults
    assert (sgd["momentum"], sgd["nesterov"]) == (0.9, True)


def test_rates_fall_with_the_depth_of_a_vision_transformer_as_in_beit() -> None:
    """As get_num_layer_for_vit() of BEiT's optim_factory.py.

    Parameters before the blocks have depth 0, and the head the most.
    """
    from torchvision.models import VisionTransformer

    model = VisionTransformer(image_size=8, patch_size=4, num_layers=3, num_heads=1, hidden_dim=4, mlp_dim=4)
    groups = build_optimizer(OptimConfig("adamw", lr=0.1, layer_decay=0.5, groups={"heads.*": {"lr_scale": 9}}), model)
    rates = {parameter: group["lr"] for group in groups.param_groups for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        number = 4
        if name.startswith(("class_token", "conv_proj", "encoder.pos_embedding")):
            number = 0
        elif "encoder_layer_" in name:
            number = int(re.findall(r"encoder_layer_(\d+)", name)[0]) + 1
        expected = 0.9 if name.startswith("heads.") else 0.1 * 0.5 ** (4 - number)  # a pattern's own rate wins
        assert rates[parameter] == pytest.approx(expected), name


def test_rates_fall_with_the_depth_of_a_residual_network() -> None:
    from torchvision.models import resnet18

    model = resnet18(num_classes=3)
    groups = build_optimizer(OptimConfig(lr=1.0, layer_decay=0.9), model).param_groups
    rates = {parameter: group["lr"] for group in groups for parameter in group["params"]}
    by_layer = {name: rates[parameter] for name, parameter in model.named_parameters() if name.endswith("weight")}
    blocks = [by_layer[f"layer{stage}.{number}.conv2.weight"] for stage in (1, 2, 3, 4) for number in (0, 1)]
    assert blocks == pytest.approx([0.9 ** (8 - number) for number in range(8)])
    assert (by_layer["conv1.weight"], by_layer["fc.weight"]) == pytest.approx((0.9**9, 1.0))


def test_rates_by_depth_need_blocks() -> None:
    with pytest.raises(ConfigError, match=r"optim\.layer_decay: this model repeats no block"):
        build_optimizer(OptimConfig(layer_decay=0.5), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
