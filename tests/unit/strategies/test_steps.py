"""The parts of a step that need no ranks, beside torch and numpy."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from jobs.llama import Llama, LlamaSizes
from toolkit.base.errors import ConfigError
from toolkit.config import TrainConfig
from toolkit.strategies.models import blocks, checkpoint_activations
from toolkit.strategies.update import (
    DECAY,
    MADE,
    NOT_FINITE,
    OVERFLOW,
    SPIKE,
    WARM_UP,
    LossScale,
    OptimizerWrapper,
    ShardedParameters,
    SpikeDetector,
    WeightAverage,
)

CPU = torch.device("cpu")


def verdicts(judge: SpikeDetector, *norms: float) -> list[int]:
    return [int(judge.verdict(torch.tensor(norm, dtype=torch.float64))) for norm in norms]


def test_a_spike_is_so_many_times_the_moving_average_of_the_steps_that_were_made() -> None:
    judge = SpikeDetector(3.0, CPU)
    early = [1.0, 50.0, *[2.0] * (WARM_UP - 2)]
    assert verdicts(judge, *early) == [MADE] * WARM_UP, "no step is a spike before there is an average"
    ages = DECAY ** np.arange(WARM_UP)[::-1]
    mean = np.average(early, weights=ages)
    assert verdicts(judge, 3.01 * mean, torch.nan, torch.inf) == [SPIKE, NOT_FINITE, NOT_FINITE]
    assert verdicts(judge, 3.01 * mean) == [SPIKE], "what is left out does not count"
    assert verdicts(judge, 2.99 * mean, 3.01 * mean) == [MADE, MADE], "and what is made does"


def test_without_a_factor_every_finite_norm_is_made() -> None:
    assert verdicts(SpikeDetector(None, CPU), *[1.0] * 50, 1e30, -torch.inf) == [MADE] * 51 + [NOT_FINITE]


def test_the_loss_scale_goes_the_way_of_torchs_grad_scaler() -> None:
    parameter = nn.Parameter(torch.ones(1))
    optimizer, scaler = torch.optim.SGD([parameter], 0.0), torch.amp.GradScaler("cpu", growth_interval=3)
    ours = LossScale(CPU)
    ours.INTERVAL = 3
    for is_bad in [False] * 4 + [True, False, True, True] + [False] * 5 + [True] * 20:
        (scaler.scale(parameter * (torch.inf if is_bad else 1.0))).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        why = ours.explained(torch.tensor(NOT_FINITE if is_bad else MADE))
        assert int(why) == ((OVERFLOW if ours.value > 1 else NOT_FINITE) if is_bad else MADE)
        ours.update(why)
        assert float(ours.value) == scaler.get_scale()


def refusal(model: nn.Module, optimizer: Any = None, **train: Any) -> str:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ConfigError) as caught:
        OptimizerWrapper(model, optimizer, TrainConfig(**train))
    return str(caught.value)


def test_what_cannot_be_done_is_refused_when_it_is_built() -> None:
    linear = nn.Linear(2, 2)
    assert refusal(linear, skip_bad_steps=True).startswith("train.skip_bad_steps: this SGD cannot leave out a step")
    assert refusal(linear, precision="fp16").startswith("train.precision: this SGD cannot leave out a step")


class Exporting(nn.Linear):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {name: value.clone() for name, value in super().state_dict(*args, **kwargs).items()}


def copying_buffers(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    state.update({name: value.clone() for name, value in state.items() if "running" in name})


def test_a_model_whose_state_dict_has_copies_of_weights_or_buffers_is_refused() -> None:
    assert refusal(Exporting(2, 2)).startswith("Exporting: its state_dict() has a copy of weight, or lacks it")
    model = nn.BatchNorm1d(2)
    assert OptimizerWrapper(model, torch.optim.SGD(model.parameters(), 0.1))
    model.register_state_dict_post_hook(copying_buffers)
    assert refusal(model).startswith("BatchNorm1d: its state_dict() has a copy of running_mean, or lacks it")


def test_an_update_that_is_asked_for_nothing_has_nothing() -> None:
    model = nn.Linear(2, 2)
    update = OptimizerWrapper(model, torch.optim.SGD(model.parameters(), 0.1))
    model(torch.ones(2)).sum().backward()
    assert update.apply(0.1) is None
    assert update.step_metrics() == {}
    assert update.state() == {}


def test_a_total_adds_what_other_ranks_hold() -> None:
    parameters = [torch.tensor([3.0, 4.0]), torch.tensor([12.0])]
    gradients = {tensor: tensor for tensor in parameters}
    assert ShardedParameters(parameters).norm(gradients, CPU) == 13
    there = ShardedParameters(parameters, lambda mine: mine.add_(84.0**2))
    assert there.norm(gradients, CPU) == 85


def test_a_tied_weight_has_its_average_under_each_of_its_names() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    update = OptimizerWrapper(model, torch.optim.SGD(model.parameters(), 0.1), TrainConfig(ema_decay=0.5))
    state = update.state()
    assert state.keys() == {"ema/decay", "ema/steps", "ema/0.weight", "ema/1.weight"}
    before = model.get_parameter("0.weight").detach().clone()
    update.evaluating()
    update.evaluating()
    update.begin()
    assert torch.equal(model.get_parameter("0.weight"), before)


def test_a_hook_of_the_optimizer_runs_before_the_average_follows() -> None:
    """docs/extending.md: where a strategy changes weights that the optimizer has just made."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def clear(*_: Any) -> None:
        torch._foreach_zero_([parameter.detach() for parameter in model.parameters()])

    optimizer.register_step_post_hook(clear)
    update = OptimizerWrapper(model, optimizer, TrainConfig(ema_decay=1e-6))
    model(torch.ones(2)).sum().backward()
    update.apply(0.1)
    state = update.state()
    assert all(state[f"ema/{name}"].value.abs().max() < 1e-5 for name in ("weight", "bias"))  # type: ignore[union-attr]


def test_a_step_that_is_left_out_leaves_the_buffers_of_the_criterion_as_they_were() -> None:
    model, criterion = nn.Linear(2, 2), nn.BatchNorm1d(2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)
    update = OptimizerWrapper(model, optimizer, TrainConfig(skip_bad_steps=True), criterion=criterion)
    criterion(model(torch.full((3, 2), torch.nan))).sum().backward()
    assert update.apply(0.1).item() == NOT_FINITE
    assert criterion.running_mean.tolist() == [0.0, 0.0]


def averaged(dtype: torch.dtype, steps: int, decay: float, **options: Any) -> tuple[OptimizerWrapper, list[float]]:
    """Return an update, and the average of its one weight after each step.

    The weight goes from 0 to 1 in the first step.
    """
    model = nn.Linear(1, 1, bias=False).to(dtype)
    nn.init.zeros_(model.weight)
    fused = {"fused": True} if options else {}
    update = OptimizerWrapper(
        model, torch.optim.SGD(model.parameters(), 1.0, **fused), TrainConfig(ema_decay=decay, **options)
    )
    seen = []
    for step in range(steps):
        model.weight.grad = torch.full((1, 1), -1.0 if step == 0 else 0.0, dtype=dtype)
        update.apply(1.0)
        seen.append(update.state()["ema/weight"].value.item())  # type: ignore[union-attr]
    return update, seen


@pytest.mark.parametrize("options", [{}, {"skip_bad_steps": True}])
def test_the_first_steps_of_an_average_count_more_than_later_ones(options: dict[str, Any]) -> None:
    """Otherwise 1 % of its training would judge a run of 100 steps. That is the share with a decay of 0.9999."""
    left, expected = 1.0, []
    for step in range(100):
        left *= min(0.9999, (1 + step) / (10 + step))
        expected.append(1 - left)
    update, seen = averaged(torch.float32, 100, 0.9999, **options)
    assert seen == pytest.approx(expected, rel=1e-5)
    assert expected[0] == pytest.approx(0.9)
    assert update.state()["ema/steps"].value == 100


def test_the_average_of_bf16_weights_is_kept_in_fp32_and_shown_rounded() -> None:
    """In bf16 a thousandth of the way from 0.5 to 1 is rounded away. The average would stand still."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    nn.init.constant_(model.weight, 0.5)
    update = OptimizerWrapper(model, torch.optim.SGD(model.parameters(), 1.0), TrainConfig(ema_decay=0.999))
    update.on_loaded({"ema/decay": 0.999, "step": 10**6})  # long after the first steps
    model.weight.grad = torch.full((1, 1), -0.5, dtype=torch.bfloat16)
    for _ in range(100):
        update.apply(1.0)
    average = update.state()["ema/weight"].value
    assert isinstance(average, torch.Tensor)
    assert average.dtype == torch.float32
    before = average.clone()
    assert average.item() == pytest.approx(1 - 0.5 * 0.999**100, rel=1e-5)
    update.evaluating()
    assert model.weight.item() == before.bfloat16().item()
    update.begin()
    assert model.weight.item() == 1.0
    assert torch.equal(average, before)


def test_an_average_that_does_not_say_how_old_it_is_does_not_begin_again() -> None:
    update, _ = averaged(torch.float32, 1, 0.5)
    update.on_loaded({"ema/decay": 0.5, "step": 7})
    assert update.state()["ema/steps"].value == 7
    update.on_loaded({"step": 7})
    assert update.state()["ema/steps"].value == 0, "one that starts here does"


class Counting(torch.optim.SGD):
    """Keeps its count of steps in its groups of parameters. Prodigy and schedule-free optimizers do that."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


def test_an_optimizer_whose_state_would_be_in_no_checkpoint_is_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"Counting keeps state in its groups of parameters \(k\)"):
        OptimizerWrapper(model, Counting(model.parameters(), 0.1)).state()
    OptimizerWrapper(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)).state()


@pytest.mark.parametrize("odd", [torch.nan, torch.inf, 1e6])
def test_a_step_that_was_left_out_does_not_end_the_watch_for_spikes(odd: float) -> None:
    judge = SpikeDetector(3.0, CPU)
    verdicts(judge, *[1.0] * WARM_UP)
    assert verdicts(judge, odd)[0] != MADE
    assert verdicts(judge, 3.5) == [SPIKE]


def test_a_spike_leaves_the_loss_scale_as_it_is() -> None:
    scale = LossScale(CPU)
    before = float(scale.value)
    scale.update(torch.tensor(SPIKE))
    assert float(scale.value) == before
    scale.update(torch.tensor(OVERFLOW))
    assert float(scale.value) == before / 2


def test_a_step_left_out_right_after_a_resume_keeps_the_loaded_statistics() -> None:
    model = nn.BatchNorm1d(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    update = OptimizerWrapper(model, optimizer, TrainConfig(skip_bad_steps=True))
    with torch.no_grad():
        model.running_mean.fill_(5.0)
    update.on_loaded({})
    update.begin()
    with torch.no_grad():
        model.running_mean.add_(1.0)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, torch.nan)
    skipped = update.apply(0.1)
    assert int(skipped) == NOT_FINITE
    assert model.running_mean.item() == 5.0


STEPS, SAVED = 40, 17


def averages(model: nn.Module, average: WeightAverage, made: Tensor | None, first: int, last: int) -> list[Tensor]:
    """Make the steps from ``first`` to ``last``, each with other weights; return the averages."""
    for step in range(first, last):
        torch.manual_seed(step)
        with torch.no_grad():
            model.get_parameter("weight").normal_()
        average.follow(made)
    return [tensor.clone() for tensor in average.of.values()]


@pytest.mark.parametrize("made", [None, torch.tensor(1.0)], ids=["all are made", "the device knows which are made"])
def test_an_average_that_was_loaded_goes_on_with_the_same_bits(made: Tensor | None) -> None:
    model = nn.Linear(50, 50)
    start = model.weight.detach().clone()
    whole = averages(model, WeightAverage(model, 0.9999), made, 0, STEPS)
    model.weight.data.copy_(start)
    before = WeightAverage(model, 0.9999)
    saved = averages(model, before, made, 0, SAVED)
    after = WeightAverage(model, 0.9999)
    for tensor, value in zip(after.of.values(), saved, strict=True):
        tensor.copy_(value)
    after.on_loaded(
        {name: entry.value for name, entry in before.state().items() if not isinstance(entry.value, Tensor)}
    )
    for ours, expected in zip(averages(model, after, made, SAVED, STEPS), whole, strict=True):
        assert torch.equal(ours, expected)


class Centred(nn.Module):
    """A layer whose pass replaces a buffer, beside a frozen parameter of integers."""

    center: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.codes = nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)
        self.register_buffer("center", torch.zeros(2))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs)
        self.center = self.center + 1
        return outputs - self.center


def test_an_average_follows_a_buffer_that_the_pass_replaces() -> None:
    model = Centred()
    average = WeightAverage(model, 0.5)
    for _ in range(3):
        model(torch.ones(1, 2))
        average.follow(None)
    expected = 0.0
    for step, center in enumerate((1.0, 2.0, 3.0)):
        expected += (1 - min(0.5, (1 + step) / (10 + step))) * (center - expected)
    assert average.of_buffers()[0].tolist() == pytest.approx([expected] * 2)
    average.show(True)
    assert model.center.tolist() == pytest.approx([expected] * 2)
    average.show(False)
    assert model.center.tolist() == [3.0, 3.0]
    assert "ema/codes" not in average.state(), "integers have no average"


def test_a_step_that_was_left_out_is_not_counted_by_the_average() -> None:
    average = WeightAverage(nn.Linear(1, 1), 0.9)
    for made, steps in ((1.0, 1), (0.0, 1), (1.0, 2)):
        average.follow(torch.tensor(made))
        assert average.state()["ema/steps"].value == steps


def test_an_average_that_a_checkpoint_lacks_begins_with_the_loaded_weights() -> None:
    model = nn.Linear(2, 2)
    average = WeightAverage(model, 0.9)
    with torch.no_grad():
        model.weight.fill_(5.0)
    average.on_loaded({})
    assert torch.equal(average.of[model.weight], model.weight)


def test_the_blocks_of_a_transformer_are_its_layers_whole() -> None:
    model = Llama(LlamaSizes(16, layers=3, width=8, heads=2, kv_heads=1, hidden=8))
    assert blocks(model) == list(model.model.layers)
    torchs = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 2)
    assert blocks(torchs) == list(torchs.layers)


@pytest.mark.parametrize(("every", "runs"), [(1, [2, 2, 2, 2, 2]), (2, [1, 2, 1, 2, 1]), (5, [1, 1, 1, 1, 2])])
def test_of_so_many_blocks_the_last_one_computes_its_activations_again(every: int, runs: list[int]) -> None:
    model = Llama(LlamaSizes(16, layers=5, width=8, heads=2, kv_heads=1, hidden=8))
    counts = [0] * 5
    for number, layer in enumerate(model.model.layers):

        def count(*_: object, number: int = number) -> None:
            counts[number] += 1

        layer.get_submodule("input_layernorm").register_forward_hook(count)
    checkpoint_activations(model, every)
    model(torch.arange(4)[None]).sum().backward()
    assert counts == runs
    with pytest.raises(ConfigError, match=r"activation_checkpointing_every: this model has 5 blocks, fewer than 6"):
        checkpoint_activations(model, 6)


def test_blocks_are_found_at_any_depth_and_none_within_another() -> None:
    def pair() -> nn.Sequential:
        return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    stage = nn.Sequential(pair(), pair())
    model = nn.ModuleDict({"stem": nn.Linear(2, 2), "body": nn.ModuleDict({"deep": nn.ModuleList([stage, nn.ReLU()])})})
    assert blocks(model) == list(stage)


def test_single_layers_and_modules_without_parameters_are_no_blocks() -> None:
    empty = [nn.Sequential(nn.ReLU()), nn.Sequential(nn.Tanh())]
    assert blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), *empty)) == []
