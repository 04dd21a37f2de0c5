"""How a rank of a parameter server handles messages, and deaths among the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from toolkit.base.errors import ToolkitError
from toolkit.plugins.parameter_server.inbox import PeerInbox
from toolkit.plugins.parameter_server.mail import Kind, PeerMessage

#: Ranks 0 and 1 are servers, 2 to 4 workers.
SERVERS, WORKERS = range(2), range(2, 5)


class Letters:
    """A mail that has received all its messages already."""

    def __init__(self, *messages: tuple[Kind, int]) -> None:
        self.receive = iter([PeerMessage(*message) for message in messages]).__next__


def inbox(*messages: tuple[Kind, int], **handlers: Callable[[PeerMessage], None]) -> PeerInbox:
    mail: Any = Letters(*messages)
    return PeerInbox(mail, SERVERS, WORKERS, {Kind[name]: handler for name, handler in handlers.items()})


def test_messages_with_a_handler_are_handled_while_another_kind_is_awaited() -> None:
    pushed: list[int] = []
    box = inbox((Kind.PUSH, 3), (Kind.SUM, 2), (Kind.PUSH, 2), PUSH=lambda message: pushed.append(message.sender))
    assert box.wait_for(Kind.SUM).sender == 2
    assert pushed == [3]


def test_messages_without_a_handler_wait_in_the_order_in_which_they_came() -> None:
    box = inbox((Kind.TELL, 4), (Kind.TELL, 3), (Kind.SUM, 2))
    assert box.wait_for(Kind.SUM).sender == 2
    assert [box.wait_for(Kind.TELL).sender for _ in range(2)] == [4, 3]


def test_gathering_goes_by_rank_and_does_not_wait_for_the_dead() -> None:
    box = inbox((Kind.SUM, 4), (Kind.LOST, 3), (Kind.SUM, 1), (Kind.SUM, 2))
    assert [message.sender for message in box.gather(Kind.SUM)] == [1, 2, 4]
    assert box.living == [2, 4]


def test_what_a_dead_worker_had_sent_before_still_counts() -> None:
    box = inbox((Kind.SUM, 3), (Kind.LOST, 3), (Kind.SUM, 1), (Kind.SUM, 2), (Kind.SUM, 4))
    assert [message.sender for message in box.gather(Kind.SUM)] == [1, 2, 3, 4]


def test_a_worker_that_dies_over_a_question_gives_no_answer() -> None:
    box = inbox((Kind.PUSH, 4), (Kind.LOST, 2), (Kind.BUFFERS, 3), PUSH=lambda message: None)
    assert box.answer(2, Kind.BUFFERS) is None
    answer = box.answer(3, Kind.BUFFERS)
    assert answer is not None
    assert answer.sender == 3


def test_a_death_is_handled_after_it_is_known() -> None:
    living: list[list[int]] = []
    box = inbox((Kind.LOST, 2), LOST=lambda message: living.append(box.living))
    box.handle_next()
    assert living == [[3, 4]]


@pytest.mark.parametrize(
    ("deaths", "reason"),
    [
        ([1], "rank 1, a parameter server, is gone"),
        ([2, 3, 4], "all 3 workers have died; see the logs of ranks 2 and up"),
    ],
)
def test_training_ends_with_a_server_or_with_the_last_worker(deaths: list[int], reason: str) -> None:
    box = inbox(*((Kind.LOST, rank) for rank in deaths))
    for _ in deaths[:-1]:
        box.handle_next()
    with pytest.raises(ToolkitError, match=reason):
        box.handle_next()
