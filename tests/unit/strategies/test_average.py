"""The moving average of the weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from toolkit.strategies.update.apply import Average

STEPS, SAVED = 40, 17


def averages(model: nn.Module, average: Average, made: Tensor | None, first: int, last: int) -> list[Tensor]:
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
    whole = averages(model, Average(model, 0.9999), made, 0, STEPS)
    model.weight.data.copy_(start)
    before = Average(model, 0.9999)
    saved = averages(model, before, made, 0, SAVED)
    after = Average(model, 0.9999)
    for tensor, value in zip(after.of.values(), saved, strict=True):
        tensor.copy_(value)
    after.loaded({name: entry.value for name, entry in before.state().items() if not isinstance(entry.value, Tensor)})
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
    average = Average(model, 0.5)
    for _ in range(3):
        model(torch.ones(1, 2))
        average.follow(None)
    expected = 0.0
    for step, center in enumerate((1.0, 2.0, 3.0)):
        expected += (1 - min(0.5, (1 + step) / (10 + step))) * (center - expected)
    assert average.of_buffers()[0].tolist() == pytest.approx([expected] * 2)
    average.show()
    assert model.center.tolist() == pytest.approx([expected] * 2)
    average.hide()
    assert model.center.tolist() == [3.0, 3.0]
    assert "ema/codes" not in average.state(), "integers have no average"


def test_a_step_that_was_left_out_is_not_counted_by_the_average() -> None:
    average = Average(nn.Linear(1, 1), 0.9)
    for made, steps in ((1.0, 1), (0.0, 1), (1.0, 2)):
        average.follow(torch.tensor(made))
        assert average.state()["ema/steps"].value == steps


def test_an_average_that_a_checkpoint_lacks_begins_with_the_loaded_weights() -> None:
    model = nn.Linear(2, 2)
    average = Average(model, 0.9)
    with torch.no_grad():
        model.weight.fill_(5.0)
    average.loaded({})
    assert torch.equal(average.of[model.weight], model.weight)
