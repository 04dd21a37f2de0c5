"""The connections of all agents to one supervisor, whose side is the real one.

One process plays the nodes, which speak as real agents do: each has a connection of its own, sends a digest of eight
ranks a second, and answers.
"""

import contextlib
import resource
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, cast
from unittest.mock import patch

from tests.scale import Curve
from toolkit.base import this_node
from toolkit.files import rundir
from toolkit.nodes.agent.messages import AgentHere, LeaveOrder, NodeAlive, NodeRequest, ReportsOrder, RequestAnswered
from toolkit.nodes.agent.reports import ProgressSummary
from toolkit.nodes.agent.wire_protocol import HEARTBEAT_S, AuthenticatedConnection
from toolkit.nodes.allocation import Allocation
from toolkit.nodes.start import agents as launched
from toolkit.nodes.start.agents import Agents, Endpoint, Progress

RANKS_A_NODE = 8
WATCHED_S, LIMIT_S = 10.0, 300.0


def play(secret_file: str, port: str, start: str, *hosts: str) -> None:
    """Be the agents of ``hosts`` until the supervisor closes their connections.

    ``moves`` of a digest has the time of sending in ms, from which the supervisor's side computes its age.
    """
    this_node.raise_open_files()
    secret, selector = Path(secret_file).read_bytes(), selectors.DefaultSelector()
    links: dict[socket.socket, AuthenticatedConnection] = {}
    for host in hosts:
        connection, link = socket.create_connection(("127.0.0.1", int(port))), AuthenticatedConnection(secret, "agent")
        connection.sendall(link.greeting + link.send(AgentHere(host, int(start), again=False)))
        selector.register(connection, selectors.EVENT_READ)
        links[connection] = link
    # The nodes send at even distances within a second, as agents that started at random do.
    due = deque((time.monotonic() + number / len(hosts), connection) for number, connection in enumerate(links))
    while links:
        for key, _ in selector.select(0.01):
            connection = cast(socket.socket, key.fileobj)
            data = connection.recv(1 << 16)
            if not data:
                selector.unregister(connection)
                del links[connection]
                continue
            messages, answer = links[connection].receive(data)
            for message in messages:
                if isinstance(message, NodeRequest):
                    answer += links[connection].send(RequestAnswered(message.request))
                if isinstance(message, LeaveOrder):
                    connection.shutdown(socket.SHUT_WR)
            with contextlib.suppress(OSError):  # it has gone
                connection.sendall(answer)
        while due[0][0] <= time.monotonic():
            at, connection = due.popleft()
            due.append((at + HEARTBEAT_S, connection))
            if connection in links:
                digest = ProgressSummary(1, RANKS_A_NODE, 0, int(time.time() * 1000), 7, 7)
                with contextlib.suppress(OSError):
                    connection.sendall(links[connection].send(NodeAlive(digest)))


class Starter:
    """Starts the process that plays them."""

    process: subprocess.Popen[bytes]

    def start(self, hosts: Sequence[str], at: Endpoint, *_: object) -> None:
        argv = [sys.executable, "-c", "import sys; from tests.scale.links import play; play(*sys.argv[1:])"]
        self.process = subprocess.Popen([*argv, str(at.secret_file), str(at.port), str(at.start), *hosts])

    def note_connected(self, host: str) -> None: ...

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()


class User:
    """Counts the agents, and notes when one is lost."""

    def __init__(self) -> None:
        self.there = 0
        self.lost: SimpleQueue[float] = SimpleQueue()

    def agent_connected(self, host: str) -> None:
        self.there += 1

    def agent_ended(self, host: str, why: str) -> None:
        self.lost.put(time.monotonic())


def serve(nodes: int) -> Mapping[str, float]:
    hosts = [f"node{number}" for number in range(nodes)]
    allocation = Allocation(tuple(hosts), (RANKS_A_NODE,) * nodes, 1)
    events: SimpleQueue[Any] = SimpleQueue()
    user: Any = User()
    starter: Any = Starter()
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(launched, "job_address", lambda *_: "127.0.0.1"),
        this_node.raised_open_files(),
    ):
        before_kb = _resident_kb()
        agents = Agents(rundir.create("scale", Path(folder)), allocation, starter)
        agents.listen({}, events, user)
        began = time.monotonic()
        agents.ensure(hosts)
        while user.there < nodes:
            assert time.monotonic() - began < LIMIT_S
            time.sleep(0.01)
        there_s = time.monotonic() - began
        oldest_s, cpu_s = _watch(events, nodes)
        began = time.monotonic()
        answers = agents.ask(dict.fromkeys(hosts, ReportsOrder()), LIMIT_S)
        asked_s = time.monotonic() - began
        began = time.monotonic()
        # The supervisor reads the end of the connection, as when the node's agent has died.
        agents._peers["node1"].connection.shutdown(socket.SHUT_RD)
        lost_s = user.lost.get(timeout=LIMIT_S) - began
        used_kb = _resident_kb() - before_kb
        agents.close()
    return {
        "all there s": round(there_s, 1),
        "CPU s a second": round(cpu_s, 2),
        "oldest progress s": round(oldest_s, 2),
        "all answered s": round(asked_s, 2),
        "answers": len(answers),
        "lost node s": round(lost_s, 2),
        "MB": round(used_kb / 1000, 1),
    }


def _watch(events: SimpleQueue[Any], nodes: int) -> tuple[float, float]:
    """Merge all progress once a second, as the watchdog does.

    Return the age of the oldest progress, and the CPU time of a second.
    """
    digests: dict[str, ProgressSummary] = {}
    oldest_s, began_s, ends = 0.0, _cpu_s(), time.monotonic() + WATCHED_S
    while (left_s := ends - time.monotonic()) > 0:
        time.sleep(min(1.0, left_s))
        try:
            while True:
                match events.get_nowait():
                    case Progress(host, digest):
                        digests[host] = digest
                    case Exception() as error:
                        raise error
        except Empty:
            pass
        # Until each node has sent once, there is no oldest progress of all.
        if len(digests) == nodes:
            oldest_s = max(oldest_s, time.time() - min(digest.moves for digest in digests.values()) / 1000)
    return oldest_s, (_cpu_s() - began_s) / WATCHED_S


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _resident_kb() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1])


CURVES = [Curve("connections of agents", "nodes", (64, 1000, 4096, 10_000), serve)]
