"""Connecting to a port of many nodes, on the loopback."""

from __future__ import annotations

import errno
import math
import resource
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.scale.dead_nodes import HERE, silent_network, silent_nodes
from toolkit.base import this_node
from toolkit.slurm import reachable
from toolkit.slurm.reachable import unreachable

THERE = "127.0.0.2"
SOFT_BEFORE = resource.getrlimit(resource.RLIMIT_NOFILE)[0]


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """Listen on this node, and on no other."""
    with socket.create_server((HERE, 0)) as listener:
        yield listener


def test_who_accepts_a_connection_is_there(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    with socket.create_server((THERE, port)):
        assert unreachable([THERE], port, here=HERE) == set()
    assert unreachable([THERE], port, here=HERE) == {THERE}


def test_a_name_that_nobody_knows_is_not_there(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    name = "no.such.host.invalid"
    with pytest.raises(socket.gaierror) as told:
        socket.getaddrinfo(name, port)
    # Where no name server answers, the name counts as not asked.
    assert unreachable([name], port, here=HERE) == ({name} if told.value.errno == socket.EAI_NONAME else set())


def test_where_not_even_our_own_node_answers_nothing_is_known(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    listener.close()
    assert unreachable([THERE], port, here=HERE) == set()


@pytest.fixture
def full() -> Iterator[int]:
    with silent_network() as port:
        yield port


def test_thousands_of_silent_nodes_are_asked_at_once(full: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the real kernel. Before, 32 were asked at a time: 939 s for a network that was away."""
    nodes, waves, ask = silent_nodes(3000), list[int](), reachable._ask
    monkeypatch.setattr(reachable, "_ask", lambda wave, timeout_s: waves.append(len(wave)) or ask(wave, timeout_s))
    assert unreachable(nodes, full, here=HERE, timeout_s=0.5) == set(nodes)
    at_once = this_node.hard_limit() - 2 * reachable.KEPT_FREE
    assert len(waves) <= math.ceil(len(nodes) / at_once)
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert soft == SOFT_BEFORE


def test_of_ten_thousand_nodes_none_is_dead_that_could_not_be_asked(full: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine runs out of descriptors. Then its name server cannot answer for some names."""
    nodes = silent_nodes(10_000)
    asked = set(nodes[:50])

    class Scarce(socket.socket):
        made = 0

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            Scarce.made += 1
            if Scarce.made > 1 + len(asked):
                raise OSError(errno.EMFILE, "Too many open files")
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(socket, "socket", Scarce)
    assert unreachable(nodes, full, here=HERE, timeout_s=0.2) == asked

    def away(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", away)
    assert unreachable(nodes[:99], full, here=HERE, timeout_s=0.2) == set()


def test_a_name_that_the_name_server_does_not_tell_in_time_is_not_dead(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    released, look_up = threading.Event(), socket.getaddrinfo

    def slow(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "slow":
            released.wait(20)
        return look_up(HERE if name == "slow" else name, *args, **kwargs)

    monkeypatch.setattr(reachable, "LOOK_UP_S", 0.2)
    monkeypatch.setattr(socket, "getaddrinfo", slow)
    assert unreachable(["slow", THERE], listener.getsockname()[1], here=HERE) == {THERE}
    released.set()
