"""Parameters are cut into runs of whole rows.

The runs are as equal in bytes as rows allow; nothing is lost or kept twice.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from toolkit.plugins.methods.parameter_server.side import Flat, cut, shadow


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(7, 33), nn.BatchNorm1d(33), nn.Linear(33, 1), nn.Linear(1, 64)
    return nn.Sequential(*layers)


@pytest.mark.parametrize("servers", [1, 2, 3, 7, 50])
def test_parts_of_servers_tile_every_parameter_and_differ_by_less_than_two_rows(servers: int) -> None:
    whole = model()
    parts = [dict(shadow(whole, cut(whole, servers), server).named_parameters()) for server in range(servers)]
    for name, parameter in whole.named_parameters():
        assert torch.equal(torch.cat([part[name] for part in parts]), parameter)
    sizes = [sum(p.nbytes for p in part.values()) for part in parts]
    assert max(sizes) - min(sizes) <= 2 * 33 * 4  # the widest row has 33 numbers


def test_a_shadow_shares_buffers_and_frozen_parameters_and_none_of_the_rows() -> None:
    whole = model()
    whole.get_parameter("0.weight").requires_grad_(False)
    part = shadow(whole, cut(whole, 2), None)
    assert part.get_buffer("1.running_mean") is whole.get_buffer("1.running_mean")
    assert part.get_parameter("0.weight") is whole.get_parameter("0.weight")
    assert part.get_parameter("2.weight").shape == (0, 33)
    assert whole.get_parameter("2.weight").shape == (1, 33)


def test_two_names_of_one_weight_stay_one_weight() -> None:
    tied = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    tied[1].weight = tied[0].weight
    part = shadow(tied, cut(tied, 2), 1)
    assert part.get_parameter("1.weight") is part.get_parameter("0.weight")


@pytest.mark.parametrize("device", ["cpu", "cpu:0"], ids=["in host memory", "over another device"])
def test_a_message_gives_back_tensors_of_any_type_and_shape(device: str) -> None:
    """cpu:0 stands in for a GPU, where tensors are packed first. torch takes it for another device than cpu."""
    tensors = [
        torch.arange(3, dtype=torch.uint8),
        torch.randn(5, 2, dtype=torch.float64),
        torch.tensor(7),
        torch.empty(0, 4),
        torch.randn(3).bfloat16(),
        torch.randn(4, 3).T,
    ]
    place = Flat(tensors)
    place._device = torch.device(device)
    message = place.pack(tensors)
    assert place.pack(tensors, message) is message, "the memory of the last message is used again"
    filled = [torch.empty_like(tensor) for tensor in tensors]
    place.unpack(message, filled)
    for before, after, other in zip(tensors, place.views(message), filled, strict=True):
        assert torch.equal(before, after)
        assert torch.equal(before, other)
        assert before.dtype == after.dtype
