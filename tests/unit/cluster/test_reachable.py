"""Asking a port, on loopback."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from toolkit.cluster.reachable import unreachable

HERE, THERE = "127.0.0.1", "127.0.0.2"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """Listens on this node, and on no other."""
    with socket.create_server((HERE, 0)) as listener:
        yield listener


def test_who_accepts_a_connection_is_there(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    with socket.create_server((THERE, port)):
        assert unreachable([THERE], port, here=HERE) == set()
    assert unreachable([THERE], port, here=HERE) == {THERE}


def test_a_name_that_nobody_knows_is_not_there(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    assert unreachable(["no.such.host.invalid"], port, here=HERE) == {"no.such.host.invalid"}


def test_where_not_even_our_own_node_answers_nothing_is_known(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    listener.close()
    assert unreachable([THERE], port, here=HERE) == set()
