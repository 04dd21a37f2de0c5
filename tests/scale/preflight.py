"""The preflight of all nodes: the batch host's side, and the verdict.

The nodes' answers are in memory, so that this machine's disk is not measured.
"""

import json
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from tests.scale import Curve
from toolkit.base import process_limits
from toolkit.nodes.agent.messages import CheckAnswered, CheckOrder
from toolkit.nodes.allocation import Allocation
from toolkit.nodes.start.agents import NodeAnswered
from toolkit.plugins.site.checks import CheckAnswer, CheckRequest, ok, preflight

CHECKS = ("cpus", "limits", "network", "shared folder", "run folder space", "temp space", "look-up")


class Agents:
    """Agents of nodes that are all well; each third one answers when all others have. Counts what they are told."""

    def __init__(self, events: SimpleQueue[Any]) -> None:
        self.told_bytes, self._events = 0, events

    def request(self, orders: Mapping[str, CheckOrder], heard: SimpleQueue[Any]) -> int:
        hosts = list(orders)
        for host in [*(host for number, host in enumerate(hosts) if number % 3), *hosts[::3]]:
            request = CheckRequest(**json.loads(orders[host].command[-1]))
            self.told_bytes += len(" ".join(orders[host].command))
            os.mknod(Path(request.folder) / host)
            now = time.time()
            answer = CheckAnswer(host, now, now, tuple(ok(check, "?") for check in CHECKS))
            message = CheckAnswered(0, json.dumps(asdict(answer)), now, now)
            heard.put(NodeAnswered(host, message, now, now))
        return 0

    def withdraw(self, number: int) -> None: ...


def check(nodes: int) -> Mapping[str, float]:
    events: SimpleQueue[Any] = SimpleQueue()
    agents: Any = Agents(events)
    hosts = [f"node{number}" for number in range(nodes)]
    process_limits.override(check_nodes_s=600.0, check_folder_s=60.0)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        job = Allocation(tuple(hosts), (8,) * nodes, 12)
        report = preflight.report_on_nodes(Path(folder), job, agents, events)
    return {"bytes to nodes": agents.told_bytes, "bad": len(report.bad), "warnings": len(report.warnings)}


CURVES = [Curve("preflight", "nodes", (500, 1000, 3000, 10_000), check)]
