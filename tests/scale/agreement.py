"""Messages of all ranks: a stop through torch's own store, and progress by agents.

The stop is proposed and decided.
"""

import time
from collections.abc import Mapping
from typing import Any

from torch.distributed import TCPStore

from tests.scale import Curve
from toolkit.hang import Watchdog
from toolkit.nodes.agent.messages import NodeAlive
from toolkit.nodes.agent.reports import NodeProgress, RankReport, parse
from toolkit.nodes.agent.wire_protocol import AuthenticatedConnection
from toolkit.ranks import older_torch
from toolkit.ranks.agreement import PREFIX, STOP, Gate, propose
from toolkit.ranks.agreement.rounds import Round
from toolkit.ranks.agreement.torch_store import StoreTransport

A_NODE = 8


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


def stop(ranks: int) -> Mapping[str, float]:
    """From the supervisor's proposal to the decision; all ranks but the last acknowledge at once."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store: Any = Counting(older_torch.clone(server))
    transport = StoreTransport(store)
    began = time.monotonic()
    propose(transport, ranks, STOP, by="the supervisor")
    transport.exists("nothing")  # sets are not answered: now all have been taken
    proposed = time.monotonic()
    keys = Round(PREFIX, 0)
    transport.set({keys.ack(rank): "[7, false]" for rank in range(ranks - 1)})
    transport.add(keys.count, ranks - 1)
    acknowledged = time.monotonic()
    gate = Gate(ranks - 1, ranks, lambda: StoreTransport(older_torch.clone(server)))
    gate._decided.wait()
    decided = time.monotonic()
    gate.close()
    seconds = {"propose s": round(proposed - began, 2), "decide s": round(decided - acknowledged, 2)}
    return {"messages": store.messages, "longest bytes": store.longest_bytes, **seconds}


def digests(ranks: int) -> Mapping[str, float]:
    """Measure a second of all ranks' progress. An agent handles its ranks, the supervisor all nodes."""
    node = NodeProgress()
    reports = [RankReport(1, rank, "in a step", 123_456, 2).as_bytes() for rank in range(A_NODE)]
    began = time.process_time()
    for data in reports:
        report = parse(data)
        assert report is not None
        node.on_report(report)
    digest = node.summarize()
    told_s = time.process_time() - began
    assert digest is not None
    ends = [AuthenticatedConnection(b"secret", role) for role in ("agent", "supervisor")]
    # A link sends messages only once it has the other side's greeting.
    for end, other in (ends, reversed(ends)):
        end.receive(other.greeting)
    message = NodeAlive(digest)
    frames = [ends[0].send(message) for _ in range(ranks // A_NODE)]
    dog = Watchdog(600.0)
    began = time.process_time()
    for number, frame in enumerate(frames):
        for heard in ends[1].receive(frame)[0]:
            assert isinstance(heard, NodeAlive)
            assert heard.progress is not None
            dog.on_report(f"node{number}", heard.progress)
    heard_s = time.process_time() - began
    return {"bytes a node": len(frames[0]), "agent ms": round(1000 * told_s, 2), "supervisor s": round(heard_s, 2)}


CURVES = [
    Curve("stop together", "ranks", (1000, 8000, 32_768, 80_000), stop),
    Curve("progress", "ranks", (1000, 8000, 32_768, 80_000), digests),
]
