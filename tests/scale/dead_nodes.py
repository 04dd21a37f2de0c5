"""The search for silent nodes: one time-out for all, by the real kernel on loopback."""

import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tests.scale import Curve
from tests.waiting import wait_for
from toolkit.plugins.node_watch.batch_host_watch import accepts_connection
from toolkit.slurm.reachable import unreachable

HERE = "127.0.0.1"


@contextmanager
def silent_network() -> Iterator[int]:
    """Yield a port on which ``HERE`` answers. The kernel drops connections to all other loopback addresses."""
    with socket.socket() as here, socket.socket() as elsewhere, socket.socket() as first, socket.socket() as second:
        for each in (here, elsewhere):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        here.bind((HERE, 0))
        here.listen()
        port: int = here.getsockname()[1]
        elsewhere.bind(("0.0.0.0", port))
        elsewhere.listen(0)
        for client in (first, second):  # its queue of one is full then
            client.setblocking(False)
            client.connect_ex(("127.0.0.2", port))
        wait_for(lambda: not accepts_connection("127.0.0.3", port, 0.2), 10.0, "a full queue")
        yield port


def silent_nodes(count: int) -> list[str]:
    """Addresses on loopback."""
    return [f"127.{1 + number // 62_500}.{number // 250 % 250}.{1 + number % 250}" for number in range(count)]


def search(nodes: int) -> Mapping[str, float]:
    with silent_network() as port:
        missing = unreachable(silent_nodes(nodes), port, here=HERE)
    return {"found dead": len(missing)}


CURVES = [Curve("dead nodes", "silent nodes", (100, 1000, 10_000), search)]
