"""What agents and supervisor do when they do not hear each other."""

import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.nodes.test_agents import Site
from tests.unit.nodes.test_steps import await_true, gone
from toolkit.nodes.agent.messages import (
    Heartbeat,
    Message,
    NodeAlive,
    ReportsOrder,
    RequestAnswered,
    WatchBatchHostOrder,
)
from toolkit.nodes.agent.wire_protocol import AuthenticatedConnection

pytestmark = pytest.mark.dist


class WatchingAgent:
    """Another node's agent, which starts a command to watch the batch host, and its supervisor."""

    def __init__(self, folder: Path) -> None:
        self.note = folder / "watching"
        secret = secrets.token_bytes(32)
        (folder / "key").write_bytes(secret)
        command = [sys.executable, "-P", "-m", "toolkit.nodes.agent.node", str(folder / "key"), str(folder)]
        with socket.create_server(("127.0.0.1", 0)) as listening:
            self.process = subprocess.Popen([*command, "127.0.0.1", str(listening.getsockname()[1]), "1", "node2"])
            self.connection, self.link = listening.accept()[0], AuthenticatedConnection(secret, "supervisor")
        self.connection.sendall(self.link.greeting)
        script = f"echo $$ > {self.note}.new; mv {self.note}.new {self.note}; exec sleep 600"
        self.say(WatchBatchHostOrder(("sh", "-c", script), 0))
        self.say(ReportsOrder())
        while RequestAnswered not in self.hear():  # a close with unread heartbeats would take the orders back
            pass

    def say(self, message: Message) -> None:
        self.connection.sendall(self.link.send(message))

    def hear(self) -> list[type[Message]]:
        """What it says next."""
        messages, answer = self.link.receive(self.connection.recv(1 << 16))
        self.connection.sendall(answer)
        return [type(message) for message in messages]

    def watcher(self) -> int:
        """The pid of what looks after the batch host, once it does."""
        await_true(self.note.exists)
        return int(self.note.read_text())


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[WatchingAgent]:
    agent = WatchingAgent(tmp_path)
    yield agent
    agent.process.kill()
    agent.process.wait()
    agent.connection.close()


def test_an_agent_that_hears_its_supervisor_leaves_the_batch_host_alone(
    agent: WatchingAgent,
) -> None:
    heard: list[type[Message]] = []
    while heard.count(NodeAlive) < 5:
        heard += agent.hear()
        agent.say(Heartbeat())
    assert not agent.note.exists()


def test_a_silent_supervisors_host_is_looked_after_until_it_speaks_again(agent: WatchingAgent) -> None:
    watcher = agent.watcher()
    agent.say(Heartbeat())
    await_true(lambda: gone(watcher))
    assert agent.process.poll() is None


def test_an_agent_without_supervisor_has_the_batch_host_looked_after(agent: WatchingAgent) -> None:
    agent.connection.close()
    watcher = agent.watcher()
    assert agent.process.poll() is None
    os.kill(watcher, signal.SIGKILL)  # it failed: there is another
    await_true(lambda: int(agent.note.read_text()) != watcher)
    second = agent.watcher()
    agent.process.kill()
    await_true(lambda: gone(second))


def test_a_silent_agent_is_known_by_its_host_until_it_speaks_again(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.start("sleep 600")
    await_true(lambda: bool(site.agents.hosts))
    os.kill(site.agent, signal.SIGSTOP)
    await_true(lambda: site.agents.silent_hosts == {"here"})
    assert not site.agents.unsure_hosts, "the node lives: its kernel acknowledges heartbeats"
    os.kill(site.agent, signal.SIGCONT)
    await_true(lambda: not site.agents.silent_hosts)
    site.agents.close()
