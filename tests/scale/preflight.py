"""The checks of all nodes before a run starts: the batch host's side of the conversation, and the verdict."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from unittest.mock import patch

from tests.scale import Curve
from toolkit.cluster.checks import Request, ok
from toolkit.launch import preflight
from toolkit.launch.preflight import Said

CHECKS = ("cpus", "cpus taken", "limits", "network", "shared folder", "run folder space", "temp space", "look-up")


class Nodes:
    """Nodes that are all well; each third one reports when all others are done. Counts what they are told."""

    def __init__(self, request: Request, hosts: Sequence[str]) -> None:
        self.events: preflight.Events = SimpleQueue()
        self.began = time.time()
        self.told_bytes = len(json.dumps(asdict(request))) * len(hosts)
        self._hosts, self._request = hosts, request
        late = range(0, len(hosts), 3)
        for task in [*(task for task in range(len(hosts)) if task % 3), *late]:
            (Path(request.folder) / hosts[task]).write_text(request.token)
            self._say(task, {"hello": hosts[task], "time": time.time(), "nodes": f"node[0-{len(hosts) - 1}]"})
            for check in CHECKS:
                self._say(task, asdict(ok(check, "?")))
            if request.pairs:
                self._say(task, {"listening": [f"10.0.{task // 256}.{task % 256}", 40_000]})
            else:
                self._say(task, {"done": hosts[task]})

    def _say(self, task: int, line: Mapping[str, object]) -> None:
        self.events.put(Said(task, json.dumps(line), time.time()))

    def send(self, line: str) -> None:
        self.told_bytes += len(line) * len(self._hosts)
        for task, host in enumerate(self._hosts):
            self._say(task, {"done": host})

    def end(self) -> None:
        """Nothing."""


def check(nodes: int) -> Mapping[str, object]:
    talks: list[Nodes] = []

    def start(request: Request, hosts: Sequence[str]) -> Nodes:
        talks.append(Nodes(request, hosts))
        return talks[0]

    hosts = [f"node{number}" for number in range(nodes)]
    environ = {"SLURM_JOB_ID": "1"}
    with tempfile.TemporaryDirectory() as folder, patch.object(preflight, "FOLDER_LIMIT_S", 60.0):
        report = preflight.check_nodes(
            Path(folder), hosts, [8] * nodes, 12, environ=environ, start=start, limit_s=600.0
        )
    return {"bytes to nodes": talks[0].told_bytes, "bad": len(report.bad), "warnings": len(report.warnings)}


CURVES = [Curve("preflight", "nodes", (500, 1000, 3000, 10_000), check)]
