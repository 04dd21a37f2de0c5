"""The gate over torch's TCPStore, with a connection for each thread, as in production."""

import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore

from tests.dist.ranks import run_ranks
from tests.waiting import wait_for
from toolkit.base.errors import ToolkitError
from toolkit.ranks import older_torch
from toolkit.ranks.agreement import STOP, Gate, propose
from toolkit.ranks.agreement.torch_store import StoreTransport, connector
from toolkit.ranks.session import Session

pytestmark = pytest.mark.dist
LIMIT_S = 20.0


@pytest.fixture
def store() -> Iterator[TCPStore]:
    """A store as a job has it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        yield older_torch.serve_store("127.0.0.1", port, listener.detach(), timedelta(seconds=30))
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("toolkit-gate")]
    assert not left, left


def test_the_transport_does_what_the_gate_is_promised(store: TCPStore) -> None:
    transport = connector(store)()
    transport.set({"a": "1", "b": '["x", 2]'})
    assert transport.get(["b", "a"]) == ['["x", 2]', "1"]
    assert (transport.claim("c", "mine"), transport.claim("c", "yours")) == ("mine", "mine")
    assert (transport.add("d", 2), transport.add("d", 1)) == (2, 3)
    assert (transport.exists("a"), transport.exists("z")) == (True, False)
    assert (transport.wait("a", 1.0), transport.wait("z", 0.01)) == (True, False)
    transport.delete("a")
    transport.delete("a")
    assert not transport.exists("a")


def test_ranks_stop_together_over_many_rounds(store: TCPStore) -> None:
    """Four ranks have speeds of their own. Any of them asks for saves, and the supervisor at last for a stop."""
    gates = [Gate(rank, 4, connector(store)) for rank in range(4)]
    agreed: list[list[tuple[str, int]]] = [[] for _ in gates]

    def train(rank: int) -> None:
        rng = random.Random(rank)
        n = 0
        while True:
            while (kind := gates[rank].boundary(n)) is not None:
                agreed[rank].append((kind, n))
                if kind == STOP:
                    return
            time.sleep(rng.random() * 0.002)
            n += 1

    def all_agreed_on(saves: int) -> bool:
        return all(len(each) >= saves for each in agreed)

    def ask() -> None:
        for i in range(10):
            gates[i % 4].request("save")
            # Two requests before a save is handed out would count as one.
            wait_for(partial(all_agreed_on, i + 1), LIMIT_S, "a save on all ranks")
        propose(StoreTransport(older_torch.clone(store)), 4, STOP, by="the supervisor")

    with ThreadPoolExecutor(5) as pool:
        for future in [pool.submit(ask), *(pool.submit(train, rank) for rank in range(4))]:
            future.result(LIMIT_S)
    for gate in gates:
        gate.close()
    assert agreed == [agreed[0]] * 4
    assert [kind for kind, _ in agreed[0]] == ["save"] * 10 + [STOP]


def test_an_idle_gate_closes_at_once(store: TCPStore) -> None:
    gates = [Gate(rank, 2, connector(store)) for rank in range(2)]
    started = time.monotonic()
    for gate in gates:
        gate.close()
    assert time.monotonic() - started < 2


def test_losing_the_store_ends_the_run_with_an_error() -> None:
    hosted = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    gate = Gate(0, 2, connector(hosted))
    del hosted
    wait_for(lambda: gate._failure is not None, LIMIT_S, "the watcher sees the connection break")
    with pytest.raises(ToolkitError, match="the store over which the ranks agree is gone"):
        gate.boundary(0)
    gate.close()


def stop_by_signal(session: Session) -> tuple[str | None, int]:
    """Train in lock step by a collective, until rank 1 signals itself in step 5."""
    import torch

    gate = Gate(session.rank, session.world_size, connector(session.store), prefix="test/stop")
    signal.signal(signal.SIGUSR1, lambda *_: gate.request(STOP))
    n = 0
    while (kind := gate.boundary(n)) is None and n < 100_000:
        if n == 5 and session.rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        dist.all_reduce(torch.ones(1))
        n += 1
    gate.close()
    return kind, n


def test_processes_in_lock_step_stop_at_one_step_after_a_signal_at_one() -> None:
    results = run_ranks(3, stop_by_signal)
    assert results[0] == results[1] == results[2]
    kind, step = results[0]
    assert kind == STOP
    assert step > 5


def test_a_blocked_client_waits_longer_than_its_own_timeout(store: TCPStore) -> None:
    """The timeout for calls must not end the watcher's wait."""
    client = older_torch.clone(store)
    transport = StoreTransport(client)
    client.set_timeout(timedelta(milliseconds=50))
    threading.Timer(0.3, lambda: store.set("late", "1")).start()
    assert transport.wait("late", LIMIT_S)
