from __future__ import annotations

import pytest
import torch
from torch import nn

from jobs.llama import Llama, LlamaSizes
from toolkit.base.errors import ConfigError
from toolkit.strategies.models import blocks, checkpoint_activations


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
