from __future__ import annotations

import ast
from pathlib import Path

import torch
from torch.nn import functional

from jobs import language_model
from jobs.gpt import GPT
from jobs.language_model import MODELS, SIZES, next_byte


def test_a_byte_changes_what_follows_from_it_and_nothing_before() -> None:
    torch.manual_seed(0)
    model, inputs = GPT(2, 16, 2, 10).eval(), torch.randint(256, (1, 10))
    other = inputs.clone()
    other[0, 6] ^= 1
    one, two = model(inputs), model(other)
    assert one.shape == (1, 10, 256)
    assert torch.equal(one[:, :6], two[:, :6])
    assert not torch.isclose(one[:, 6:], two[:, 6:]).all(-1).any()


def test_the_loss_of_a_window_is_the_mean_over_its_bytes() -> None:
    logits, targets = torch.randn(3, 5, 256), torch.randint(256, (3, 5))
    total = next_byte(logits, targets)
    expected = sum(functional.cross_entropy(logits[n], targets[n]) for n in range(3))
    torch.testing.assert_close(total, expected)


def test_every_size_can_be_chosen_and_the_job_is_short_enough_to_copy() -> None:
    assert tuple(SIZES) == MODELS
    source = Path(language_model.__file__).read_text()
    assert ast.get_docstring(ast.parse(source))
    assert len(source.splitlines()) <= 120
