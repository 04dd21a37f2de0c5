"""The launcher with a real agent on this machine. What it starts here is no Python: a zygote takes seconds."""

from __future__ import annotations

import os
import secrets
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from tests.unit.launch.test_steps import await_true, gone
from toolkit import rundir
from toolkit.agent.link import Link
from toolkit.launch import agent_links
from toolkit.launch.agent_launcher import AgentLauncher
from toolkit.launch.agent_starters import LocalAgent
from toolkit.launch.agents import Agents
from toolkit.launch.allocation import Allocation
from toolkit.launch.steps import LaunchFailed, RankEnded, Step, StepEnded
from toolkit.launch.store import Report, StoreHostEnded

TIMEOUT_S = 20
#: A store that says where it is and what it is told, and at its end says a last word.
STORE = """echo '{"ready": true, "port": 7}'; while read line; do echo "$line"; done; echo '{"last": 1}'"""


class Shell:
    """In place of a container: starts a script instead of the store."""

    def __init__(self, script: str) -> None:
        self._script = script

    def command(self, module: Sequence[str]) -> list[str]:
        return ["sh", "-c", self._script]


class Site:
    """A run, the launcher of its ranks, and what happens to them."""

    def __init__(self, folder: Path, ranks: int = 1, store: str = STORE) -> None:
        self.run = rundir.create("agents", folder)
        self.events: SimpleQueue[Any] = SimpleQueue()
        self.allocation = Allocation(("here",), (ranks,), 1)
        self.starter = LocalAgent(self.run)
        self.agents = Agents(self.run, self.allocation, self.starter)
        self.launcher = AgentLauncher(self.run, self.allocation, self.agents, Shell(store))  # type: ignore[arg-type]
        self.attempt = 0

    def start(self, script: str, **environ: str) -> Step:
        self.attempt += 1
        environ = {**os.environ, "MASTER_ADDR": "127.0.0.1", **environ}
        self.store = self.launcher.start_store(self.attempt, 1, "127.0.0.1", environ, self.events)
        command = ["sh", "-c", script]
        return self.launcher.start(self.attempt, self.allocation, command, environ, self.events, self.store)

    def next(self) -> Any:
        """What happens next to ranks, or to the store at its end."""
        while isinstance(event := self.events.get(timeout=TIMEOUT_S), Report):
            pass
        return event

    @property
    def agent(self) -> int:
        (process,) = self.starter._processes
        return int(process.pid)

    def log(self, rank: int) -> str:
        return self.run.rank_log(self.attempt, rank).read_text()


def test_ranks_know_their_numbers_and_where_the_store_is_and_log_apart(tmp_path: Path) -> None:
    site = Site(tmp_path, ranks=3)
    site.start("echo $RANK of $WORLD_SIZE at $MASTER_ADDR:$MASTER_PORT")
    assert site.next() == StepEnded(0)
    for rank in range(3):
        assert site.log(rank) == f"{rank} of 3 at 127.0.0.1:7\n"
    site.agents.close()


def test_a_rank_that_ends_badly_is_reported_before_the_others_have_ended(tmp_path: Path) -> None:
    site = Site(tmp_path, ranks=2)
    step = site.start("[ $RANK = 1 ] && kill -9 $$; sleep 600")
    ended = site.next()
    assert isinstance(ended, RankEnded)
    assert (ended.ranks, ended.host, ended.signal, ended.with_agent) == ((1,), "here", signal.SIGKILL, False)
    step.kill()
    assert [type(site.next()), type(site.next())] == [RankEnded, StepEnded]
    site.agents.close()


@pytest.mark.parametrize("apart", ["", "setsid "])
def test_what_a_rank_leaves_behind_is_ended_with_it(tmp_path: Path, apart: str) -> None:
    """Also in a session of its own."""
    note = tmp_path / "pid"
    site = Site(tmp_path)
    site.start(f"{apart}sh -c 'echo $$ > {note}; exec sleep 600' & while [ ! -s {note} ]; do sleep 0.01; done; exit 3")
    ended = site.next()
    assert isinstance(ended, RankEnded)
    assert ended.exit_code == 3
    assert site.next() == StepEnded(3)
    site.store.close(TIMEOUT_S)
    await_true(lambda: gone(int(note.read_text())))
    site.agents.close()


def test_the_next_attempt_has_the_same_agent_and_its_own_environment(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.start("echo $WORD-$PPID", WORD="one", GONE="1")
    assert site.next() == StepEnded(0)
    first = site.log(0)
    site.store.close(TIMEOUT_S)
    site.start("echo $WORD$GONE-$PPID", WORD="two")
    assert site.next() == StepEnded(0)
    assert (first, site.log(0)) == (f"one-{site.agent}\n", f"two-{site.agent}\n")
    site.agents.close()


def test_a_program_that_is_not_there_could_not_be_started(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.start("true")
    assert site.next() == StepEnded(0)
    environ = dict(os.environ)
    store = site.launcher.start_store(2, 1, "127.0.0.1", environ, site.events)
    site.launcher.start(2, site.allocation, ["no-such-program"], environ, site.events, store)
    failed = site.next()
    assert isinstance(failed, LaunchFailed)
    assert failed.ranks == (0,)
    assert "no-such-program" in failed.why
    assert site.next() == StepEnded(1)
    site.agents.close()


def test_ranks_end_with_their_agent_and_the_next_attempt_has_another(tmp_path: Path) -> None:
    site = Site(tmp_path)
    note = tmp_path / "pid"
    site.start(f"echo $$ > {note}.new; mv {note}.new {note}; sleep 600")
    await_true(note.exists)
    os.kill(site.agent, signal.SIGKILL)
    happened = [site.next(), site.next(), site.next()]
    assert {type(event) for event in happened} == {RankEnded, StepEnded, StoreHostEnded}
    (ended,) = (event for event in happened if isinstance(event, RankEnded))
    assert ended.with_agent
    assert ended.signal == signal.SIGKILL
    await_true(lambda: gone(int(note.read_text())))
    site.store.close(TIMEOUT_S)
    site.start("true")
    assert site.next() == StepEnded(0)
    site.agents.close()


def test_an_agent_that_cannot_run_is_a_launch_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(tmp_path)
    site.start("true", PYTHONHOME="/nowhere")
    happened = [site.next(), site.next(), site.next()]
    assert {type(event) for event in happened} == {LaunchFailed, StepEnded, StoreHostEnded}
    (failed,) = (event for event in happened if isinstance(event, LaunchFailed))
    assert "agent.log" in failed.why
    site.agents.close()


def test_a_kill_before_there_is_an_agent_ends_the_attempt(tmp_path: Path) -> None:
    site = Site(tmp_path, store="sleep 600")
    step = site.start("echo started")
    step.kill()
    assert site.next() == StepEnded(-signal.SIGKILL)
    assert not site.run.rank_log(1, 0).exists()
    site.agents.close()


def test_what_the_store_is_told_and_says_goes_through_and_it_ends_when_it_is_closed(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.start("sleep 600")
    site.store.propose("stop", by="a test")
    said = [site.events.get(timeout=TIMEOUT_S).content for _ in range(2)]
    assert said == [{"ready": True, "port": 7}, {"propose": "stop", "by": "a test"}]
    site.store.close(TIMEOUT_S)
    assert site.events.get_nowait().content == {"last": 1}
    site.agents.close()


def test_a_store_that_ends_by_itself_is_reported(tmp_path: Path) -> None:
    site = Site(tmp_path, store=STORE.partition(";")[0] + "; exit 3")
    site.start("sleep 600")
    assert site.next() == StoreHostEnded(3)
    site.agents.close()


def test_everything_ends_with_the_launcher(tmp_path: Path) -> None:
    site = Site(tmp_path)
    note = tmp_path / "pid"
    site.start(f"echo $$ > {note}.new; mv {note}.new {note}; sleep 600")
    await_true(note.exists)
    agent = site.agent
    site.agents.close()
    await_true(lambda: gone(agent) and gone(int(note.read_text())))


# ------------------------------------------------------------------------------------------------------------ strangers


def call(site: Site) -> socket.socket:
    return socket.create_connection(("127.0.0.1", site.agents._port), timeout=TIMEOUT_S)


def is_closed(connection: socket.socket) -> bool:
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    return True


def test_strangers_get_nothing_and_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence, garbage, half a frame, a frame that is too long, and more of them than there may be."""
    monkeypatch.setattr(agent_links, "STRANGER_S", 0.5)
    monkeypatch.setattr(agent_links, "MAX_STRANGERS", 8)
    site = Site(tmp_path)
    step = site.start("sleep 600")
    assert site.events.get(timeout=TIMEOUT_S).content["port"] == 7
    strangers = [call(site) for _ in range(6)]
    for stranger, words in zip(
        strangers,
        [
            b"",
            secrets.token_bytes(1000),
            secrets.token_bytes(40),
            secrets.token_bytes(32) + b"\xff" * 40,
            b"GET / HTTP/1.1\r\n\r\n",
        ],
        strict=False,
    ):
        stranger.sendall(words)
    flood = [call(site) for _ in range(40)]
    assert all(is_closed(connection) for connection in (*strangers, *flood))
    step.kill()
    assert [type(site.next()), type(site.next())] == [RankEnded, StepEnded]
    site.agents.close()


def test_the_words_of_an_agent_can_be_replayed_by_nobody(tmp_path: Path) -> None:
    """What an agent has sent is worth nothing on another connection: its keys have the supervisor's numbers in them."""
    site = Site(tmp_path)
    site.start("sleep 600")
    assert site.events.get(timeout=TIMEOUT_S).content["port"] == 7
    (peer,) = site.agents.links._peers.values()
    overheard = Link(peer.link._secret, "agent")
    overheard.receive(peer.link.greeting)
    words = overheard.greeting + overheard.send({"is": "here", "host": "here"})
    with call(site) as stranger:
        stranger.sendall(words)
        assert is_closed(stranger)
    site.agents.close()
