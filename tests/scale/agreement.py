"""The store of an attempt, torch's own server: a stop that is proposed and decided, and the reports of all ranks."""

from __future__ import annotations

import contextlib
import io
import json
import time
from collections.abc import Mapping
from typing import Any

from torch.distributed import TCPStore

from tests.scale import Curve
from toolkit.dist import store_host
from toolkit.dist.report import rank_key
from toolkit.dist.stop import PREFIX, STOP, Gate, _Round, propose
from toolkit.dist.stop_store import StoreTransport


class Counting:
    """Counts the messages of several keys that go to a store, and the longest."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.messages = self.longest_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def _count(self, texts: list[str]) -> None:
        self.messages += 1
        self.longest_bytes = max(self.longest_bytes, sum(len(text) + 9 for text in texts))

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        self._count([*keys, *values])
        self._store.multi_set(keys, values)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self._count(keys)
        values: list[bytes] = self._store.multi_get(keys)
        return values


def stop(ranks: int) -> Mapping[str, object]:
    """From the supervisor's proposal to the decision; all ranks but the last acknowledge at once."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store: Any = Counting(server.clone())
    transport = StoreTransport(store)
    began = time.monotonic()
    propose(transport, ranks, STOP, by="the supervisor")
    transport.exists("nothing")  # sets are not answered: now all have been taken
    proposed = time.monotonic()
    keys = _Round(PREFIX, 0)
    transport.set({keys.ack(rank): "[7, false]" for rank in range(ranks - 1)})
    transport.add(keys.count, ranks - 1)
    acknowledged = time.monotonic()
    gate = Gate(ranks - 1, ranks, lambda: StoreTransport(store.clone()))
    gate._decided.wait()
    decided = time.monotonic()
    gate.close()
    seconds = {"propose s": f"{proposed - began:.2f}", "decide s": f"{decided - acknowledged:.2f}"}
    return {"messages": store.messages, "longest bytes": store.longest_bytes, **seconds}


def look(ranks: int) -> Mapping[str, object]:
    """The store host's look at all reports, each of which is new."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store: Any = Counting(server)
    relay = store_host._Relay(store, ranks)
    report = json.dumps({"doing": "in a step", "done": 123456, "count": 2, "beat": 3, "time": 1.5})
    StoreTransport(server.clone()).set({rank_key(rank): report for rank in range(ranks)})
    said = io.StringIO()
    began = time.monotonic()
    with contextlib.redirect_stdout(said):
        relay.pass_on(everything=True)
    took_s = time.monotonic() - began
    lines = said.getvalue().splitlines()
    longest = max(map(len, lines))
    return {
        "messages": store.messages,
        "longest bytes": store.longest_bytes,
        "longest line": longest,
        "look s": f"{took_s:.2f}",
    }


CURVES = [
    Curve("stop together", "ranks", (1000, 8000, 32_768, 80_000), stop),
    Curve("reports", "ranks", (1000, 8000, 32_768, 80_000), look),
]
