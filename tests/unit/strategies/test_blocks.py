from __future__ import annotations

from torch import nn

from jobs.llama import Llama, LlamaSizes
from toolkit.strategies.blocks import blocks


def test_the_blocks_of_a_transformer_are_its_layers_whole() -> None:
    model = Llama(LlamaSizes(16, layers=3, width=8, heads=2, kv_heads=1, hidden=8))
    assert blocks(model) == list(model.model.layers)
    torchs = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 2)
    assert blocks(torchs) == list(torchs.layers)


def test_blocks_are_found_at_any_depth_and_none_within_another() -> None:
    def pair() -> nn.Sequential:
        return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    stage = nn.Sequential(pair(), pair())
    model = nn.ModuleDict({"stem": nn.Linear(2, 2), "body": nn.ModuleDict({"deep": nn.ModuleList([stage, nn.ReLU()])})})
    assert blocks(model) == list(stage)


def test_single_layers_and_modules_without_parameters_are_no_blocks() -> None:
    empty = [nn.Sequential(nn.ReLU()), nn.Sequential(nn.Tanh())]
    assert blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), *empty)) == []
