"""The search for the rank behind a hang. Each node digests its own stacks, at 0.5 ms a file."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import cast
from unittest.mock import patch

from tests.scale import Curve
from toolkit import hang
from toolkit.files import rundir
from toolkit.files.rundir import RunDir
from toolkit.nodes.agent.messages import StacksAnswered, StacksOrder
from toolkit.nodes.agent.reports import RankProgress
from toolkit.nodes.start.agents import Agents
from toolkit.plugins.node_watch import investigation, stack_summary

DELAY_S = 0.0005
A_NODE = 8
WAITS = 'Current thread 0x01 (most recent call first):\n  File "/x/torch/distributed/c10d.py", line 1 in all_reduce\n'
WORKS = WAITS.replace("torch/distributed/c10d.py", "jobs/mine.py").replace("all_reduce", "load")


class Nodes:
    """Agents of ranks that all wait but the last. They work side by side, so the slowest one's time counts."""

    silent_hosts = ()

    def __init__(self, ranks: int) -> None:
        self._last = ranks - 1
        self.slowest_s, self.longest = 0.0, 0

    def ask(self, orders: Mapping[str, StacksOrder], wait_s: float) -> Mapping[str, StacksAnswered]:
        return {host: StacksAnswered(order.request, json.loads(self._digest(order))) for host, order in orders.items()}

    def _digest(self, order: StacksOrder) -> str:
        rank_progress = [RankProgress(each.rank, "in a step", 7, 300.0, False) for each in order.rank_progress]
        began = time.monotonic()
        with patch.object(stack_summary, "stack_text", self._read):
            text = stack_summary.summarize_stacks(RunDir(Path(order.run)).attempt_logs(order.attempt), rank_progress)
        self.slowest_s, self.longest = max(self.slowest_s, time.monotonic() - began), max(self.longest, len(text))
        return text

    def _read(self, path: Path) -> str:
        time.sleep(DELAY_S)
        return (WORKS if path.stem == f"stack-{self._last}" else WAITS) + hang.ANSWERED


def investigate(ranks: int) -> Mapping[str, float]:
    """The last rank hangs, at the same step as all others."""
    nodes = Nodes(ranks)
    unknown = [RankProgress(rank, None, None, 300.0, False) for rank in range(ranks)]
    hosts = {f"node{first}": unknown[first : first + A_NODE] for first in range(0, ranks, A_NODE)}
    began = time.process_time()
    named, _ = investigation.blame(
        investigation.collect_stacks(cast(Agents, nodes), rundir.RunDir(Path("/x")), 1, hosts, {})
    )
    cpu_s = time.process_time() - began
    figures = {
        "slowest node s": round(nodes.slowest_s, 2),
        "bytes a node": nodes.longest,
        "CPU s of all": round(cpu_s, 1),
    }
    return {**figures, "rank named": int(named == [ranks - 1])}


CURVES = [Curve("hang report", "ranks", (1000, 8000, 16_000, 80_000), investigate)]
