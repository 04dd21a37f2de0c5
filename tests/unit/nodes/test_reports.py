"""The socket between ranks and agent: what comes through, and which connections are refused."""

import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager

import pytest

from tests.waiting import wait_for
from toolkit.nodes.agent import reports
from toolkit.nodes.agent.reports import MAX_BYTES, AgentGoneError, Inbox, Outbox, addresses, token_of

TIMEOUT_S = 20


@pytest.fixture
def names() -> list[str]:
    return addresses(secrets.token_hex(16))


@pytest.fixture
def inbox(names: list[str]) -> Iterator[Inbox]:
    inbox = Inbox(names)
    yield inbox
    inbox.close()


@pytest.fixture
def rank(names: list[str]) -> Iterator[Callable[[], Outbox]]:
    """Yield a function that opens a rank's end of the socket."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(closing(Outbox(names)))


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


def test_what_a_rank_has_said_before_it_died_is_heard(inbox: Inbox, names: list[str]) -> None:
    code = f"import os; from toolkit.nodes.agent.reports import Outbox; Outbox({names!r}).send(b'last'); os._exit(9)"
    assert subprocess.run([sys.executable, "-c", code], timeout=TIMEOUT_S).returncode == 9
    assert inbox.take() == [b"last"]


def test_an_agent_that_takes_nothing_delays_no_rank(inbox: Inbox, outbox: Outbox) -> None:
    begun = time.monotonic()
    while outbox.send(b"x" * 1000):
        pass
    assert time.monotonic() - begun < TIMEOUT_S / 2
    assert inbox.take()
    assert outbox.send(b"again")


def test_a_last_word_waits_for_an_agent_that_is_busy_or_has_not_come_yet(names: list[str], outbox: Outbox) -> None:
    assert not outbox.send(b"too early")
    waiting = threading.Thread(target=outbox.send, args=[b"last", TIMEOUT_S])
    waiting.start()
    inbox = Inbox(names)
    assert wait_for(inbox.take, TIMEOUT_S, "the last word") == [b"last"]
    waiting.join(TIMEOUT_S)
    inbox.close()


def test_a_rank_notices_that_its_agent_has_ended(names: list[str], outbox: Outbox) -> None:
    inbox = Inbox(names)
    assert outbox.send(b"here")
    inbox.take()
    inbox.close()
    with pytest.raises(AgentGoneError):
        outbox.send(b"still here?")


def test_a_name_is_that_of_a_job_on_a_node() -> None:
    jobs, nodes = [token_of(b"secret"), token_of(b"other")], [{}, *({"SLURMD_NODENAME": node} for node in ("n1", "n2"))]
    found = [name for job in jobs for node in nodes for name in addresses(job, node)]
    assert len({*found}) == 6 * reports.NAMES
    assert all(name.startswith("\0") and len(name) < 108 for name in found)
    assert {*addresses(jobs[0], {"SLURMD_NODENAME": "n" * 255})}.isdisjoint(found)


#: Another user of the node, who has read the names in /proc/net/unix.
STRANGER = r"""
import os, select, socket, sys, time
os.setuid(54321)
what, names = sys.argv[1], ["\0" + word for word in sys.argv[2:]]
made = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(len(names) if what != "hold" else 200)]
if what in ("bind", "listen"):
    for one, name in zip(made, names):
        one.bind(name)
        if what == "listen":
            one.listen()
print("ready", flush=True)
while True:
    if what == "hold":
        for one in made:
            one.setblocking(False)
            try:
                one.connect(names[0])
                one.send(b"garbage")
            except OSError:
                pass
        [one.close() for one in made]
        made = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(200)]
    else:
        time.sleep(1)
"""


@contextmanager
def another_user(what: str, names: list[str]) -> Iterator[None]:
    argv = [sys.executable, "-c", STRANGER, what, *(name.removeprefix("\0") for name in names)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"ready\n"
            yield
        finally:
            process.kill()


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


@as_root
@pytest.mark.parametrize("how", ["bind", "listen"])
def test_another_user_who_takes_the_names_of_ended_agents_stops_nobody(names: list[str], how: str) -> None:
    with another_user(how, names[:3]), closing(Inbox(names, TIMEOUT_S)) as inbox, closing(Outbox(names)) as outbox:
        assert outbox.send(b"from a rank")
        assert inbox.take() == [b"from a rank"]


@as_root
def test_another_user_who_connects_without_end_keeps_no_rank_away(inbox: Inbox, names: list[str]) -> None:
    is_over = threading.Event()
    heard: list[bytes] = []

    def serve() -> None:
        while not is_over.is_set():
            select.select([inbox], [], [], 0.1)
            heard.extend(inbox.take())

    agent = threading.Thread(target=serve)
    agent.start()
    try:
        with another_user("hold", names[:1]), another_user("hold", names[:1]):
            for number in range(8):
                with closing(Outbox(names)) as outbox:
                    assert outbox.send(b"%d" % number, TIMEOUT_S)
        wait_for(lambda: len(heard) == 8, TIMEOUT_S, "what the ranks have said")
    finally:
        is_over.set()
        agent.join()
    assert heard == [b"%d" % number for number in range(8)]


def test_an_earlier_agent_that_is_stopped_is_killed(names: list[str]) -> None:
    code = f"from toolkit.nodes.agent.reports import Inbox; Inbox({names!r}); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as earlier:
        earlier.stdout.readline()
        earlier.send_signal(signal.SIGSTOP)
        with closing(Inbox(names)) as inbox, closing(Outbox(names)) as outbox:
            assert earlier.wait(TIMEOUT_S) == -signal.SIGKILL
            assert outbox.send(b"here")
            assert inbox.take() == [b"here"]


@pytest.mark.usefixtures("inbox")
def test_no_process_takes_a_name_from_itself(names: list[str]) -> None:
    with pytest.raises(OSError, match="in use"):
        Inbox(names)


def test_another_users_connection_is_closed(inbox: Inbox, names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel tells the user of the process at the other end."""
    ours = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: ours + 1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(names[0])
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


def test_a_name_that_an_agent_leaves_is_taken_by_the_next_one(inbox: Inbox, names: list[str]) -> None:
    threading.Timer(0.3, inbox._listening.close).start()
    Inbox(names, TIMEOUT_S).close()


def test_a_report_in_another_encoding_than_utf_8_is_not_a_report() -> None:
    """The agent passes reports on as UTF-8, and would end at one that is not."""
    text = reports.RankReport(1, 0, "in a step", 7, 0).as_bytes().decode()
    assert reports.parse(text.encode()) is not None
    assert reports.parse(text.encode("utf-16")) is None
