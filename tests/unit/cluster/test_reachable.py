"""Asking a port, on loopback."""

from __future__ import annotations

import socket

from toolkit.cluster.reachable import unreachable


def test_who_accepts_a_connection_is_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert unreachable(["127.0.0.1"], port) == set()
    assert unreachable(["127.0.0.1"], port) == {"127.0.0.1"}


def test_a_name_that_nobody_knows_is_not_there() -> None:
    assert unreachable(["no.such.host.invalid", "127.0.0.1"], 1) == {"no.such.host.invalid", "127.0.0.1"}
