"""The moving average of the weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from toolkit.strategies.update.average import Average

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
