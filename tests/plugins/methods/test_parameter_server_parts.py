"""What parameter servers refuse before anything is queued."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from toolkit.base.errors import ConfigError, ToolkitError
from toolkit.config import load_config, validate
from toolkit.plugins.methods.parameter_server.messaging import Kind, PeerInbox, PeerMessage
from toolkit.plugins.methods.parameter_server.side import Flat, cut, server_partition

STRUCTURED = ["train.pruning.amount=0.5", "train.pruning.end_step=9", "train.pruning.structured=true"]


SERVERS = ["cluster.tasks_per_node=4", "strategy.parameter_server.servers=2"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["strategy.parameter_server.servers=3"], ["strategy.parameter_server.servers", "3 of 3 ranks"]),
        (["data.global_batch_size=1"], ["data.global_batch_size", "2 ranks"]),
        (["train.accumulate=33"], ["train.accumulate", "32"]),
        (["strategy.parameter_server.mode=asinc"], ["strategy.parameter_server.mode", "did you mean 'async'?"]),
        (["strategy.parameter_server.servers=0"], ["strategy.parameter_server.servers", "1 or more"]),
        ([*SERVERS, "optim.name=muon"], ["optim.name", "strategy.parameter_server.servers 2"]),
        ([*SERVERS, "train.skip_bad_steps=true"], ["train.skip_bad_steps", "workers", "ddp"]),
        ([*SERVERS, "train.ema_decay=0.9"], ["train.ema_decay", "workers", "ddp"]),
        ([*SERVERS, "train.clip_norm=1"], ["train.clip_norm", "strategy.parameter_server.servers to 1"]),
        ([*SERVERS, *STRUCTURED], ["train.pruning", "strategy.parameter_server.servers to 1"]),
        ([*SERVERS, "strategy.parameter_server.mode=async", *STRUCTURED], ["train.pruning", "mode async", "mode sync"]),
    ],
)
def test_what_it_cannot_do_is_refused_with_key_and_remedy(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(load_config("configs/digits_parameter_server.yaml", overrides, site=False))
    for word in words:
        assert word in str(caught.value)


class Letters:
    """A mail that has received all its messages already."""

    def __init__(self, *messages: tuple[Kind, int]) -> None:
        self.receive = iter([PeerMessage(*message) for message in messages]).__next__


def inbox(*messages: tuple[Kind, int], **handlers: Callable[[PeerMessage], None]) -> PeerInbox:
    mail: Any = Letters(*messages)
    return PeerInbox(mail, {Kind[name]: handler for name, handler in handlers.items()})


def test_messages_with_a_handler_are_handled_while_another_kind_is_awaited() -> None:
    pushed: list[int] = []
    box = inbox((Kind.PUSH, 3), (Kind.SUM, 2), (Kind.PUSH, 2), PUSH=lambda message: pushed.append(message.sender))
    assert box.wait_for(Kind.SUM).sender == 2
    assert pushed == [3]


def test_messages_without_a_handler_wait_in_the_order_in_which_they_came() -> None:
    box = inbox((Kind.TELL, 4), (Kind.TELL, 3), (Kind.SUM, 2))
    assert box.wait_for(Kind.SUM).sender == 2
    assert [box.wait_for(Kind.TELL).sender for _ in range(2)] == [4, 3]


def test_gathering_goes_by_rank() -> None:
    box = inbox((Kind.SUM, 4), (Kind.TELL, 2), (Kind.SUM, 1), (Kind.SUM, 3), (Kind.SUM, 2))
    assert [message.sender for message in box.gather(Kind.SUM, range(1, 5))] == [1, 2, 3, 4]
    assert box.wait_for(Kind.TELL).sender == 2


@pytest.mark.parametrize("dead", [1, 3])
def test_the_attempt_ends_with_any_rank_after_what_it_had_sent(dead: int) -> None:
    box = inbox((Kind.SUM, dead), (Kind.LOST, dead))
    assert box.wait_for(Kind.SUM).sender == dead
    with pytest.raises(ToolkitError, match=f"rank {dead} is gone; see its log"):
        box.gather(Kind.SUM, [1, 2, 3])


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(7, 33), nn.BatchNorm1d(33), nn.Linear(33, 1), nn.Linear(1, 64)
    return nn.Sequential(*layers)


@pytest.mark.parametrize("servers", [1, 2, 3, 7, 50])
def test_parts_of_servers_tile_every_parameter_and_differ_by_less_than_two_rows(servers: int) -> None:
    whole = model()
    parts = [dict(server_partition(whole, cut(whole, servers), server).named_parameters()) for server in range(servers)]
    for name, parameter in whole.named_parameters():
        assert torch.equal(torch.cat([part[name] for part in parts]), parameter)
    sizes = [sum(p.nbytes for p in part.values()) for part in parts]
    assert max(sizes) - min(sizes) <= 2 * 33 * 4  # the widest row has 33 numbers


def test_a_shadow_shares_buffers_and_frozen_parameters_and_none_of_the_rows() -> None:
    whole = model()
    whole.get_parameter("0.weight").requires_grad_(False)
    part = server_partition(whole, cut(whole, 2), None)
    assert part.get_buffer("1.running_mean") is whole.get_buffer("1.running_mean")
    assert part.get_parameter("0.weight") is whole.get_parameter("0.weight")
    assert part.get_parameter("2.weight").shape == (0, 33)
    assert whole.get_parameter("2.weight").shape == (1, 33)


def test_two_names_of_one_weight_stay_one_weight() -> None:
    tied = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    tied[1].weight = tied[0].weight
    part = server_partition(tied, cut(tied, 2), 1)
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
