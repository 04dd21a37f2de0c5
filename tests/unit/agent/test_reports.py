"""The socket between ranks and agent: what comes through, and which connections are refused."""

from __future__ import annotations

import os
import secrets
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest

from tests.waiting import wait_for
from toolkit.agent import reports
from toolkit.agent.progress import MAX_BYTES
from toolkit.agent.reports import AgentGoneError, Inbox, Outbox, address, token_of

TIMEOUT_S = 20


@pytest.fixture
def name() -> str:
    return address(secrets.token_hex(16))


@pytest.fixture
def inbox(name: str) -> Iterator[Inbox]:
    inbox = Inbox(name)
    yield inbox
    inbox.close()


@pytest.fixture
def rank(name: str) -> Iterator[Callable[[], Outbox]]:
    """Yield a function that opens a rank's end of the socket."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(closing(Outbox(name)))


@pytest.fixture
def outbox(rank: Callable[[], Outbox]) -> Outbox:
    return rank()


def test_what_several_ranks_say_comes_whole_and_in_order(inbox: Inbox, rank: Callable[[], Outbox]) -> None:
    ranks = [rank() for _ in range(8)]
    for number in range(3):
        for index, outbox in enumerate(ranks):
            assert outbox.send(f"{index} {number}".encode())
    assert select.select([inbox], [], [], TIMEOUT_S)[0]
    messages = inbox.take()
    assert inbox.take() == []
    for number in range(8):
        own = [message for message in messages if message.startswith(f"{number} ".encode())]
        assert own == [f"{number} {count}".encode() for count in range(3)]


def test_the_longest_report_comes_through(inbox: Inbox, outbox: Outbox) -> None:
    assert outbox.send(b"x" * MAX_BYTES)
    assert inbox.take() == [b"x" * MAX_BYTES]


def test_what_a_rank_has_said_before_it_died_is_heard(inbox: Inbox, name: str) -> None:
    code = f"import os; from toolkit.agent.reports import Outbox; Outbox({name!r}).send(b'last'); os._exit(9)"
    assert subprocess.run([sys.executable, "-c", code], timeout=TIMEOUT_S).returncode == 9
    assert inbox.take() == [b"last"]


def test_an_agent_that_takes_nothing_delays_no_rank(inbox: Inbox, outbox: Outbox) -> None:
    begun = time.monotonic()
    while outbox.send(b"x" * 1000):
        pass
    assert time.monotonic() - begun < TIMEOUT_S / 2
    assert inbox.take()
    assert outbox.send(b"again")


def test_a_last_word_waits_for_an_agent_that_is_busy_or_has_not_come_yet(name: str, outbox: Outbox) -> None:
    assert not outbox.send(b"too early")
    waiting = threading.Thread(target=outbox.send, args=[b"last", TIMEOUT_S])
    waiting.start()
    inbox = Inbox(name)
    assert wait_for(inbox.take, TIMEOUT_S, "the last word") == [b"last"]
    waiting.join(TIMEOUT_S)
    inbox.close()


def test_a_rank_notices_that_its_agent_has_ended(name: str, outbox: Outbox) -> None:
    inbox = Inbox(name)
    assert outbox.send(b"here")
    inbox.take()
    inbox.close()
    with pytest.raises(AgentGoneError):
        outbox.send(b"still here?")


@pytest.mark.usefixtures("inbox")
def test_an_address_is_that_of_a_job_on_a_node(name: str) -> None:
    token = token_of(b"secret")
    names = {address(token, {"SLURMD_NODENAME": node}) for node in ("n1", "n2")} | {address(token, {})}
    assert len(names | {address(token_of(b"other"), {})}) == 4
    assert all(name.startswith("\0") and len(name) < 108 for name in names)
    assert address(token, {"SLURMD_NODENAME": "n" * 255}) not in names
    with pytest.raises(OSError, match="in use"):
        Inbox(name)


def test_another_users_connection_is_closed(inbox: Inbox, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel tells the user of the process at the other end."""
    ours = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: ours + 1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(name)
        stranger.send(b'{"attempt": 99}')
        assert inbox.take() == []
        stranger.settimeout(TIMEOUT_S)
        with pytest.raises(ConnectionResetError):
            stranger.recv(1)


def test_a_user_who_sends_without_end_does_not_keep_the_agent(inbox: Inbox, outbox: Outbox) -> None:
    is_over = threading.Event()

    def flood() -> None:
        while not is_over.is_set():
            outbox.send(b"x", 0.01)

    flooding = threading.Thread(target=flood)
    flooding.start()
    begun = time.monotonic()
    for _ in range(3):
        assert len(inbox.take()) <= reports.MOST_ROUNDS
    assert time.monotonic() - begun < TIMEOUT_S
    is_over.set()
    flooding.join(TIMEOUT_S)


def test_a_name_that_an_agent_leaves_is_taken_by_the_next_one(inbox: Inbox, name: str) -> None:
    threading.Timer(0.3, inbox._listening.close).start()
    Inbox(name, TIMEOUT_S).close()
