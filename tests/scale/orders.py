"""The orders by which agents start the ranks of an attempt, one for each node.

The agents here only count the orders.
"""

import os
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

from tests.scale import Curve
from toolkit.files import rundir
from toolkit.nodes.agent.messages import Message, encoded
from toolkit.nodes.allocation import Allocation
from toolkit.nodes.start.launcher import MODULE, AgentLauncher

RANKS_A_NODE = 8


def start(nodes: int) -> Mapping[str, float]:
    hosts = tuple(f"node{node}" for node in range(nodes))
    allocation = Allocation(hosts, (RANKS_A_NODE,) * nodes, 1, job_id="1")
    sizes: list[int] = []

    def send(host: str, order: Message) -> None:
        sizes.append(len(encoded(order)))

    calls = {"listen": lambda *_, **__: None, "ensure": lambda _: None}
    known = {"environ": dict(os.environ), "reports_token": "1", **calls}
    agents: Any = SimpleNamespace(hosts={*hosts}, send=send, lock=nullcontext(), **known)
    events: SimpleQueue[Any] = SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        launcher = AgentLauncher(rundir.create("scale", Path(folder)), allocation, agents)
        command = [*MODULE, "toolkit", "run"]
        launcher.listen(command, os.environ, events)
        store: Any = launcher.start_store(1, allocation.world_size, hosts[0], os.environ)
        store.take('{"port": 7}\n')
        launcher.start(1, allocation, command, os.environ, store)
    orders = sizes[1:]  # the first one starts the store
    return {"orders": len(orders), "longest bytes": max(orders)}


CURVES = [Curve("orders", "nodes", (1000, 4096, 10_000), start)]
