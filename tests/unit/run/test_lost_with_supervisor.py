"""Nodes that die with their supervisor. The next supervisor continues without them, or has the job requeued."""

import os
import socket
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pytest

from tests.process_limits import ChangeLimits
from tests.unit.run.test_supervisor_nodes import ALLOCATION, leave
from toolkit.base.errors import EXIT_STOPPED
from toolkit.config import JobConfig
from toolkit.files.rundir import RunDir
from toolkit.nodes.agent.messages import (
    AgentHere,
    LeaveOrder,
    MainRankReport,
    Message,
    ProcessEnded,
    StartOrder,
    StoreOutput,
)
from toolkit.nodes.agent.reports import RankReport
from toolkit.nodes.agent.wire_protocol import AuthenticatedConnection
from toolkit.nodes.start.agents import Agents, Endpoint, OnFailure
from toolkit.nodes.start.launcher import AgentLauncher
from toolkit.plugins.testing.fake_slurm import FakeSlurm
from toolkit.run.job import slurm_job
from toolkit.run.supervise.supervisor import Supervisor

pytestmark = pytest.mark.usefixtures("quick")

ATTEMPT = 3


class Node:
    """Plays the agent of one node. Its ranks end with exit code 0 as soon as they start."""

    def __init__(self, at: Endpoint, host: str, *, start: int = 0, again: bool = False) -> None:
        """Connect to the supervisor. ``again``: one that was killed had started the agent."""
        self._link = AuthenticatedConnection(at.secret, "agent")
        self._connection = socket.create_connection(("127.0.0.1", at.port))
        self._connection.sendall(self._link.greeting)
        self.say(AgentHere(host, start, again))
        threading.Thread(target=self._serve, daemon=True).start()

    def say(self, message: Message) -> None:
        self._connection.sendall(self._link.send(message))

    def die(self) -> None:
        self._connection.shutdown(socket.SHUT_RDWR)

    def _serve(self) -> None:
        with self._connection:
            try:
                while data := self._connection.recv(1 << 16):
                    orders, answer = self._link.receive(data)
                    self._connection.sendall(answer)
                    for order in orders:
                        if isinstance(order, LeaveOrder):
                            return
                        if isinstance(order, StartOrder):
                            self._start(order)
            except OSError:  # it has died
                pass

    def _start(self, order: StartOrder) -> None:
        for process in order.processes:
            rank, attempt = process.rank, order.attempt
            if rank is None:
                self.say(StoreOutput(attempt, '{"port": 7}\n'))
                continue
            if rank == 0:
                result = {"step": 10, "metrics": {}}
                report = RankReport(attempt, 0, "finishing", 10, 0, {"step": 10, "step_start": 5}, result)
                self.say(MainRankReport(report.as_bytes().decode()))
            self._end(attempt, rank, 0)

    def _end(self, attempt: int, rank: int, code: int) -> None:
        self.say(ProcessEnded(attempt, rank, code, False, time.time()))


class Starter:
    """Starts agents on the living nodes."""

    def __init__(self, dead: Collection[str]) -> None:
        self._dead = dead

    def start(self, hosts: Sequence[str], at: Endpoint, environ: Mapping[str, str], on_failure: OnFailure) -> None:
        for host in {*hosts} - {*self._dead}:
            Node(at, host, start=at.start)
        on_failure({*hosts} & {*self._dead}, "no answer")

    def note_connected(self, host: str) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize("when", ["before", "meanwhile", "after"])
@pytest.mark.parametrize("dead", [["node2"], ["node3"], ["node2", "node3"]], ids=" ".join)
@pytest.mark.parametrize("used", [["node1", "node2"], ["node3", "node2"]], ids=" ".join)
@pytest.mark.parametrize("fewer", [True, False])
def test_the_next_supervisor_goes_on_without_nodes_that_died_with_the_last(
    run: RunDir,
    slurm: FakeSlurm,
    monkeypatch: pytest.MonkeyPatch,
    change_limits: ChangeLimits,
    fewer: bool,
    used: list[str],
    dead: list[str],
    when: str,
) -> None:
    """They die before, while or after the other agents connect to the next supervisor."""
    change_limits(agents_return_s=0.2)
    monkeypatch.setattr(slurm_job, "unreachable", lambda hosts, port, here, timeout_s: {*hosts} & {*dead})
    leave(run, nodes=used)
    config = JobConfig()
    config.cluster.spare_nodes, config.retry.allow_fewer_nodes = 1, fewer
    config.cluster.preflight = False
    endpoint = Endpoint.listen(run, ALLOCATION.hosts, os.environ)
    agents = Agents(run, ALLOCATION, Starter(dead), endpoint)
    launcher = AgentLauncher(run, ALLOCATION, agents)
    open_links, prepare = launcher.listen, launcher.start_agents
    came: list[Node] = []

    def opened(*arguments: Any) -> None:
        endpoint.secret_file.touch()  # the last supervisor has written it
        open_links(*arguments)
        came.extend(Node(endpoint, host, again=True) for host in dead if when != "before")
        if when == "meanwhile":
            for node in came:
                node.die()
        for host in {*ALLOCATION.hosts} - {*dead}:
            Node(endpoint, host, again=True)

    def prepared(*arguments: Any) -> None:
        prepare(*arguments)
        if when == "after":
            for node in came:
                node.die()

    monkeypatch.setattr(launcher, "listen", opened)
    monkeypatch.setattr(launcher, "start_agents", prepared)
    code = Supervisor(run, config, ALLOCATION, launcher, slurm, agents).run("killed")
    endpoint.listening.close()
    has_enough = fewer or len(dead) == 1
    assert code == (0 if has_enough else EXIT_STOPPED)
    assert slurm.show_job("1").restarts == (not has_enough)
    assert run.attempts()[0].attempt == ATTEMPT
    if has_enough:
        assert run.attempts()[-1].cause == "completed"
        assert not {*run.attempts()[-1].nodes} & {*dead}
