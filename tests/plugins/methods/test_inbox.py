"""How a rank of a parameter server handles messages, and deaths among the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from toolkit.base.errors import ToolkitError
from toolkit.plugins.methods.parameter_server.mail import Kind, PeerInbox, PeerMessage


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
