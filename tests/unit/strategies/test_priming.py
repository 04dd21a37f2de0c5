import random
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from toolkit.base.errors import ConfigError, JobFailedError
from toolkit.config import TrainConfig
from toolkit.ranks.batch import Batch
from toolkit.ranks.state import Sharded
from toolkit.strategies import Loss, Objective, criterion_objective
from toolkit.strategies.priming import CheckedObjective, undone, unused_message

OUTPUTS, TARGETS = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 2, 1, 1, 0])


class Keeps(nn.Module):
    """A module that changes everything that a pass can change."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.calls, self.text, self.last = 0, "none", None
        self.seen, self.by_name, self.queue = [1, [2]], {"a": (1, 2)}, deque([0.5], maxlen=3)
        self.table = torch.zeros(3)
        self.hidden = {"kept beside": 0}
        self.own = object()

    def get_extra_state(self) -> dict[str, int]:
        return self.hidden

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.hidden = state

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls, self.text, self.last = self.calls + 1, "some", inputs  # type: ignore[assignment]
        self.seen[1].append(3)  # type: ignore[attr-defined]
        self.by_name["b"] = (3, 4)
        self.queue.append(1.0)
        self.table += 1
        self.hidden["kept beside"] += 1
        random.random(), np.random.rand(), torch.rand(1)
        return self.norm(inputs)


def test_an_undone_pass_restores_buffers_attributes_extra_state_and_random_numbers() -> None:
    module = Keeps()
    # the objects themselves must stay, since the user's code may hold them too
    lists = module.seen, module.by_name, module.queue, module.table
    before = {name: tensor.clone() for name, tensor in module.state_dict().items() if isinstance(tensor, Tensor)}
    drawn = random.getstate(), np.random.get_state(legacy=False)["state"]["key"].copy(), torch.get_rng_state()
    with undone(module, None, "no module"):
        module.eval().train()(OUTPUTS)
        module.eval()
    assert module.training
    assert (module.calls, module.text, module.last) == (0, "none", None)
    assert (module.seen, module.by_name, list(module.queue)) == ([1, [2]], {"a": (1, 2)}, [0.5])
    assert all(a is b for a, b in zip(lists, (module.seen, module.by_name, module.queue, module.table), strict=True))
    assert module.hidden == {"kept beside": 0}
    assert not module.table.any()
    assert all(torch.equal(module.state_dict()[name], value) for name, value in before.items())
    assert drawn[0] == random.getstate()
    assert np.array_equal(drawn[1], np.random.get_state(legacy=False)["state"]["key"])
    assert torch.equal(drawn[2], torch.get_rng_state())


def losses(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets, reduction="none")


def refusal_of(objective: Objective, samples: int) -> str | None:
    checked = CheckedObjective(objective, TrainConfig())
    places = torch.arange(samples)
    checked(lambda inputs: inputs, Batch((OUTPUTS[:samples].requires_grad_(), TARGETS[:samples]), places, samples))
    return checked.refusal


@pytest.mark.parametrize(
    "criterion",
    [
        lambda o, t: (losses(o, t).sum(), None),
        lambda o, t: ((losses(o, t) * t).sum(), t.sum().float()),
        lambda o, t: (losses(o, t).sum() * 0, None),
        lambda o, t: (losses(o + torch.rand_like(o), t).sum(), None),  # draws random numbers: no check is possible
        lambda o, t: (losses(o.bfloat16(), t).sum(), None),
    ],
    ids=["sum", "weights", "nothing", "drawn", "bf16"],
)
def test_a_sum_over_samples_is_taken(criterion: Any) -> None:
    assert refusal_of(criterion_objective(criterion), len(OUTPUTS)) is None


@pytest.mark.parametrize(
    ("criterion", "words"),
    [
        (lambda o, t: (losses(o, t).mean(), None), "not a sum over samples"),
        (lambda o, t: (losses(o, t).mean(), torch.tensor(len(t))), "the value of the loss for two samples"),
        (
            lambda o, t: (losses(o, t).sum(), torch.tensor(1.0)),
            "the weight of the loss for two samples given",
        ),
        (lambda o, t: (losses(o, t).sum() + 3, None), "not a sum over samples"),
        (lambda o, t: (losses(o @ o.t(), torch.arange(len(o))).sum(), None), "strategy.name: custom"),
    ],
    ids=["mean", "mean and count", "weight of one", "constant", "contrastive"],
)
@pytest.mark.parametrize("samples", [1, 5])
def test_what_is_no_sum_over_samples_is_refused_with_what_to_do(criterion: Any, words: str, samples: int) -> None:
    refusal = refusal_of(criterion_objective(criterion), samples)
    assert words in refusal
    assert "toolkit.Loss.sum(value) of a sum over the batch's samples" in refusal
    assert f"{__file__}:" in refusal or "objective.py:" in refusal


def test_a_value_whose_double_overflows_says_nothing() -> None:
    """A pipeline's first call is on uninitialized memory, which may hold such numbers."""
    huge = torch.full((2, 1), 1.2e38, requires_grad=True)
    checked = CheckedObjective(criterion_objective(lambda o, t: (o.sum(), None)), TrainConfig(), probes=1)
    checked(lambda inputs: inputs, Batch((huge, torch.zeros(2)), torch.arange(2), 2))
    assert checked.refusal is None


def test_a_criterion_that_returns_a_loss_alone_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"returned a Tensor instead of \(sum, weight\)"):
        refusal_of(criterion_objective(losses), 5)  # type: ignore[arg-type]


def test_parameters_without_a_gradient_are_named() -> None:
    assert unused_message(["a", "b"]).startswith("model: the loss does not depend on a, b; freeze")


@pytest.mark.parametrize(("parts", "ranks", "shards"), [(3, 2, 1), (3, 2, 2), (2, 4, 3), (1, 2, 1)])
def test_the_pieces_of_all_ranks_and_shards_make_up_the_tensor_once(parts: int, ranks: int, shards: int) -> None:
    """By the definition, a rank has its chunk of each part of the rows.

    A shard has its own chunk of these, put in a row.
    """
    whole = torch.arange(48 * 2).view(48, 2)
    seen = torch.zeros_like(whole)
    for rank in range(ranks):
        mine = torch.cat([part.chunk(ranks)[rank] for part in whole.chunk(parts)])
        start = rank * len(mine)
        for own in mine.chunk(shards):
            entry = Sharded(own.clone(), (48, 2), (start, 0), fused=(parts, ranks) if parts > 1 else (1, 1))
            for value, (row, column) in entry.pieces():
                assert torch.equal(value, whole[row : row + len(value), column:])
                seen[row : row + len(value)] += 1
            start += len(own)
    assert (seen == 1).all()


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda model, batch: losses(model(batch.inputs), batch.targets), None),
        (lambda model, batch: Loss.mean(losses(model(batch.inputs), batch.targets).mean()), None),
        (lambda model, batch: Loss.mean(losses(model(batch.inputs), batch.targets).mean(), len(batch)), None),
        (lambda model, batch: Loss.sum(losses(model(batch.inputs), batch.targets).mean()), "not a sum over samples"),
        (lambda model, batch: Loss.mean(losses(model(batch.inputs), batch.targets).sum()), "not a sum over samples"),
        (lambda model, batch: Loss.sum(losses(model(batch.inputs), batch.targets).sum().detach()), "on no parameter"),
        (lambda model, batch: Loss.sum(model(batch.inputs).sum() / 0), "inf: look at the data"),
        (
            lambda model, batch: {"a": Loss.sum(model(batch[0]).sum()), "b": 0.1 * Loss.sum(model(batch[0]).mean())},
            "the value of the loss 'b' for two",
        ),
    ],
)
def test_a_loss_says_whether_it_is_a_sum_or_a_mean_and_is_believed_after_a_look(loss: Any, words: str | None) -> None:
    refusal = refusal_of(Objective(loss), 5)
    assert refusal is None if words is None else words in str(refusal)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda model, batch: model(batch.inputs).sum(), "the loss is a tensor of shape ()"),
        (lambda model, batch: 1.0, "the loss is a float"),
        (lambda model, batch: Loss.sum(model(batch.inputs)), r"the loss has the shape (5, 3) and is not a scalar"),
        (lambda model, batch: {"rows": model(batch.inputs)}, "the loss 'rows' is a tensor of shape (5, 3)"),
    ],
)
def test_what_is_no_loss_is_refused_with_its_file_and_line(loss: Any, words: str) -> None:
    with pytest.raises(JobFailedError) as caught:
        refusal_of(Objective(loss), 5)
    assert words in str(caught.value)
    assert f"{__file__}:" in str(caught.value)
