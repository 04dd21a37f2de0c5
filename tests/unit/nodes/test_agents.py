"""The launcher with a real agent on this machine. The ranks are shell scripts: a zygote takes seconds to start."""

import contextlib
import os
import re
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Timer
from types import SimpleNamespace
from typing import Any

import pytest

from tests.process_limits import ChangeLimits
from tests.unit.nodes.test_reports import another_user, as_root
from tests.unit.nodes.test_steps import await_true, gone
from tests.waiting import processes_with, wait_for
from toolkit.files import rundir
from toolkit.nodes.agent import wire_protocol
from toolkit.nodes.agent.messages import (
    AgentHere,
    AgentSignalled,
    CheckAnswered,
    CheckOrder,
    LeaveOrder,
    ProcessEnded,
    RanksReporting,
    ReportsOrder,
    StacksAnswered,
    StacksOrder,
)
from toolkit.nodes.agent.reports import AgentGoneError, Outbox, ProgressSummary, RankProgress, RankReport, addresses
from toolkit.nodes.agent.wire_protocol import AuthenticatedConnection
from toolkit.nodes.allocation import Allocation
from toolkit.nodes.start import agent_starters, agents, children
from toolkit.nodes.start.agent_starters import LocalAgent
from toolkit.nodes.start.agents import Agents, AgentUser, Endpoint, NodeAnswered, NodeSilent, Progress
from toolkit.nodes.start.launcher import (
    AgentLauncher,
    AllRanksEnded,
    LaunchFailed,
    RanksExited,
    RanksSucceeded,
    RunningRanks,
    StoreHostEnded,
)
from toolkit.slurm.commands import Settings

TIMEOUT_S = 20
#: A store that prints its port, and notes the lines that it gets.
STORE = """echo '{"port": 7}'; while read line; do echo "$line" >> told; done"""


class Shell:
    """Stands for a container: starts a script instead of the store."""

    def __init__(self, script: str) -> None:
        self._script = script

    def command(self, module: Sequence[str]) -> list[str]:
        return ["sh", "-c", self._script]


class Site:
    """A run, the launcher of its ranks, and the events of these ranks."""

    def __init__(self, folder: Path, ranks: int = 1, store: str = STORE, settings: Settings | None = None) -> None:
        self.run = rundir.create("agents", folder)
        self.allocation = Allocation(("here",), (ranks,), 1)
        self.starter = LocalAgent(self.run)
        self.endpoint = Endpoint.listen(self.run, self.allocation.hosts, os.environ)
        self.attempt, self._shell = 0, Shell(store)
        self._settings = [] if settings is None else [lambda: settings]
        self.begin()

    def begin(self) -> None:
        """Begin as the run's supervisor, the first one or a later one."""
        self.events: SimpleQueue[Any] = SimpleQueue()
        self.is_open = False
        self.agents = Agents(self.run, self.allocation, self.starter, self.endpoint)
        shell: Any = self._shell
        self.launcher = AgentLauncher(self.run, self.allocation, self.agents, shell, *self._settings)

    def die(self) -> None:
        """End as by SIGKILL, without a message to the agents."""
        self.agents.disconnect()

    def close(self) -> None:
        self.agents.close()
        self.endpoint.listening.close()

    def prepare(self, environ: Mapping[str, str]) -> None:
        if not self.is_open:
            self.is_open = True
            self.launcher.listen(["sh"], environ, self.events)
        self.launcher.start_agents(self.allocation.hosts)

    def start(self, script: str, **environ: str) -> RunningRanks:
        self.attempt += 1
        environ = {**os.environ, "MASTER_ADDR": "127.0.0.1", **environ}
        if self.attempt == 1:
            self.prepare(environ)
        self.store: Any = self.launcher.start_store(self.attempt, 1, "127.0.0.1", environ)
        command = ["sh", "-c", script]
        return self.launcher.start(self.attempt, self.allocation, command, environ, self.store)

    def next(self) -> Any:
        """Return the next event of the ranks or the store. Ends with exit code 0 are left out."""
        while isinstance(event := self.events.get(timeout=TIMEOUT_S), RanksSucceeded):
            pass
        return event

    @property
    def agent(self) -> int:
        (process,) = self.starter._processes
        return int(process.pid)

    def log(self, rank: int) -> str:
        return self.run.rank_log(self.attempt, rank).read_text()


NewSite = Callable[..., Site]


@pytest.fixture
def new_site(tmp_path: Path) -> Iterator[NewSite]:
    """Return what makes a site in the test's folder, and close it at the end."""
    with contextlib.ExitStack() as stack:

        def new(*args: Any, **options: Any) -> Site:
            site = Site(tmp_path, *args, **options)
            stack.callback(site.close)
            return site

        yield new


@pytest.fixture
def site(new_site: NewSite) -> Site:
    return new_site()


def test_ranks_know_their_numbers_and_where_the_store_is_and_log_apart(new_site: NewSite) -> None:
    site = new_site(ranks=3)
    site.start("echo $RANK of $WORLD_SIZE at $MASTER_ADDR:$MASTER_PORT")
    assert site.next() == AllRanksEnded(0)
    for rank in range(3):
        assert site.log(rank) == f"{rank} of 3 at 127.0.0.1:7\n"


def test_a_rank_that_ends_well_is_reported_before_the_others_have_ended(new_site: NewSite) -> None:
    site = new_site(ranks=2)
    step = site.start("[ $RANK = 1 ] && exit 0; sleep 600")
    assert site.events.get(timeout=TIMEOUT_S) == RanksSucceeded((1,))
    step.send_signal()
    assert [type(site.next()), type(site.next())] == [RanksExited, AllRanksEnded]


@pytest.mark.parametrize("signals_all", [False, True])
def test_a_signal_that_slurm_sends_the_agent_alone_reaches_the_ranks(new_site: NewSite, signals_all: bool) -> None:
    """As with proctrack/cgroup. Where Slurm signals all processes itself, the ranks do not get the signal twice."""
    site = new_site(ranks=2, settings=Settings(signals_all=signals_all))
    step = site.start("trap 'exit 3' TERM; trap 'exit 4' USR2; echo ready; while :; do sleep 0.02; done")
    await_true(lambda: all(site.run.rank_log(1, rank).exists() and site.log(rank) == "ready\n" for rank in (0, 1)))
    os.kill(site.agent, signal.SIGTERM)
    assert site.next() == AgentSignalled()
    if signals_all:
        step.send_signal(signal.SIGUSR2)  # by the supervisor
    assert {site.next().exit_code, site.next().exit_code} == {4 if signals_all else 3}
    site.store.close()
    site.start("true")
    assert [type(site.next()), site.next()] == [AllRanksEnded, AllRanksEnded(0)]  # the agent has stayed


def test_a_rank_that_ends_badly_is_reported_before_the_others_have_ended(new_site: NewSite) -> None:
    site = new_site(ranks=2)
    step = site.start("[ $RANK = 1 ] && kill -9 $$; sleep 600")
    ended = site.next()
    assert isinstance(ended, RanksExited)
    assert (ended.ranks, ended.host, ended.signal, ended.with_agent) == ((1,), "here", signal.SIGKILL, False)
    step.send_signal()
    assert [type(site.next()), type(site.next())] == [RanksExited, AllRanksEnded]


@pytest.mark.parametrize("apart", ["", "setsid "])
def test_what_a_rank_leaves_behind_is_ended_with_it(site: Site, tmp_path: Path, apart: str) -> None:
    """Also a process in a session of its own."""
    note = tmp_path / "pid"
    site.start(f"{apart}sh -c 'echo $$ > {note}; exec sleep 600' & while [ ! -s {note} ]; do sleep 0.01; done; exit 3")
    ended = site.next()
    assert isinstance(ended, RanksExited)
    assert ended.exit_code == 3
    assert site.next() == AllRanksEnded(3)
    site.store.close()
    await_true(lambda: gone(int(note.read_text())))


def test_daemons_of_a_rank_end_with_their_agent(tmp_path: Path) -> None:
    """Also one that another daemon has started, which becomes the agent's child only by the death of that."""
    note = tmp_path / "pid"
    site = Site(tmp_path)
    daemon = f"setsid sh -c 'trap \"\" TERM; (echo $$ > {note}; exec sleep 600)'"
    site.start('(setsid sh -c "$DAEMON & sleep 600" &); exec sleep 600', DAEMON=daemon)
    await_true(lambda: note.exists() and note.read_text().endswith("\n"))
    assert len(processes_with(str(tmp_path))) > 3
    site.agents.close()
    await_true(lambda: processes_with(str(tmp_path)) == {})
    site.endpoint.listening.close()


#: Saves when it is told to end, in the time that the test gives it, and prints meanwhile. It counts the signals.
SAVES = """
import os, signal, sys, time

def save(number, frame):
    print("told", flush=True)
    while not os.path.exists("go"):
        time.sleep(0.01)
    print("saved", flush=True)
    os.rename("half", "saved")
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
open("half", "w").close()
print("up", flush=True)
while True:
    time.sleep(0.01)
"""
#: As `conda run` does it: Python starts a script of bash, which starts the command.
WRAPPER = "import subprocess, sys; sys.exit(subprocess.call(['bash', '-c', ' '.join(sys.argv[1:]) + '; exit $?']))"
LEADERS = {
    "python": "exec $SAVE",
    "bash, with more lines": "bash -c '$SAVE; touch next'",
    "a pipe": "$SAVE | tee log; touch next",
    "a pipe in a group": "bash -c '{ $SAVE; touch next; } 2>&1 | tee log; touch next'",
    "conda run": f'{sys.executable} -c "{WRAPPER}" $SAVE',
    "uv run": f"{sys.prefix}/bin/uv run --no-project -- $SAVE",
    "time": "bash -c 'time $SAVE; touch next'",
    "a trap that ends": "trap 'exit 0' TERM; $SAVE & wait",
    "a trap that passes on": "trap 'kill $child; wait $child; exit' TERM; $SAVE & child=$!; wait; touch next",
    "a trap behind": "trap 'touch trapped; exit' TERM; $SAVE; touch next",
    "a helper beside it": "sleep 600 & bash -c 'sleep 600 & $SAVE; touch next'",
    "a session of its own": "setsid --wait $SAVE",
    "job control": "bash -c 'set -m; $SAVE; touch next'",
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("leader", LEADERS)
def test_what_saves_has_its_time_whatever_starts_it(
    leader: str, new_site: NewSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "save.py").write_text(SAVES)
    site = new_site()
    step = site.start(LEADERS[leader], SAVE=f"{sys.executable} -I -S save.py")
    output = tmp_path / "log" if "pipe" in leader else site.run.rank_log(1, 0)
    wait_for(lambda: output.exists() and "up" in output.read_text(), TIMEOUT_S, "the script")
    step.send_signal(signal.SIGTERM)
    wait_for(lambda: "told" in output.read_text(), TIMEOUT_S, "the signal")
    step.send_signal(signal.SIGTERM)  # a second one would end some scripts at once
    with pytest.raises(Empty):
        site.events.get(timeout=0.3)
    (tmp_path / "go").touch()
    site.store.close()
    wait_for((tmp_path / "saved").exists, TIMEOUT_S, "what it saves")
    while not isinstance(site.next(), AllRanksEnded):
        pass
    assert output.read_text().split("saved")[0].count("told") == 1 or leader == "a trap that passes on"
    assert output.read_text().endswith("saved\n") or leader == "time"
    assert (tmp_path / "trapped").exists() == (leader == "a trap behind")
    assert not (tmp_path / "next").exists()
    wait_for(lambda: not processes_with(f"PWD={tmp_path}"), TIMEOUT_S, "no process of the script")


def test_the_next_attempt_has_the_same_agent_and_its_own_environment(site: Site) -> None:
    site.start("echo $WORD-$PPID", WORD="one", GONE="1")
    assert site.next() == AllRanksEnded(0)
    first = site.log(0)
    site.store.close()
    site.start("echo $WORD$GONE-$PPID", WORD="two")
    assert site.next() == AllRanksEnded(0)
    assert (first, site.log(0)) == (f"one-{site.agent}\n", f"two-{site.agent}\n")


def test_a_program_that_is_not_there_could_not_be_started(site: Site) -> None:
    site.start("true")
    assert site.next() == AllRanksEnded(0)
    environ = dict(os.environ)
    store = site.launcher.start_store(2, 1, "127.0.0.1", environ)
    site.launcher.start(2, site.allocation, ["no-such-program"], environ, store)
    failed = site.next()
    assert isinstance(failed, LaunchFailed)
    assert failed.ranks == (0,)
    assert "no-such-program" in failed.why
    assert site.next() == AllRanksEnded(1)


def start_sleeper(site: Site, note: Path, text: str = "$$") -> None:
    """Start a rank that writes ``text`` to the file ``note``, and then sleeps."""
    site.start(f"echo {text} > {note}.new; mv {note}.new {note}; sleep 600")
    await_true(note.exists)


def lost_with_agent(site: Site) -> RanksExited:
    """Return how the rank has ended of which the agent and the store are gone as well."""
    happened = [site.next(), site.next(), site.next()]
    assert {type(event) for event in happened} == {RanksExited, AllRanksEnded, StoreHostEnded}
    (ended,) = (event for event in happened if isinstance(event, RanksExited))
    return ended


def test_ranks_end_with_their_agent_and_the_next_attempt_has_another(site: Site, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    start_sleeper(site, note)
    os.kill(site.agent, signal.SIGKILL)
    ended = lost_with_agent(site)
    assert ended.with_agent
    assert ended.signal == signal.SIGKILL
    await_true(lambda: gone(int(note.read_text())))
    site.store.close()
    site.start("true")
    assert site.next() == AllRanksEnded(0)


def test_an_agent_that_is_stopped_is_replaced_and_its_ranks_end(
    new_site: NewSite, tmp_path: Path, change_limits: ChangeLimits
) -> None:
    change_limits(agent_unheard_s=2.5)
    site, note = new_site(), tmp_path / "pid"
    start_sleeper(site, note)
    stopped = site.agent
    os.kill(stopped, signal.SIGSTOP)
    assert "has sent nothing for" in lost_with_agent(site).how
    site.store.close()
    site.start("true")
    assert site.next() == AllRanksEnded(0)
    await_true(lambda: gone(stopped) and gone(int(note.read_text())))


def test_a_supervisor_that_was_stopped_itself_gives_no_agent_up(
    site: Site, tmp_path: Path, change_limits: ChangeLimits
) -> None:
    """As where Slurm suspends the whole job: all clocks have gone on meanwhile."""
    site.start(f"while [ ! -e {tmp_path}/go ]; do sleep 0.05; done")
    await_true(lambda: site.agents.hosts)
    change_limits(agent_unheard_s=3.0)
    with site.agents.lock:
        time.sleep(5)  # the thread that serves the agents stands still for longer than an agent may be silent
    (tmp_path / "go").touch()
    assert site.next() == AllRanksEnded(0)


#: Stands for the agent's program: one whose node is found sick at once.
def test_a_listener_that_fails_is_named_once_and_the_ranks_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(AgentUser):
        def agent_connected(self, host: str) -> None:
            raise ValueError("no number")

    class Listening(AgentUser):
        def __init__(self) -> None:
            self.messages: list[Any] = []

        def take_message(self, host: str, message: Any) -> None:
            self.messages.append(type(message))

    site, listening = Site(tmp_path), Listening()
    site.agents.listeners = (Failing(), listening)
    site.start("true")
    assert site.next() == AllRanksEnded(0)
    assert ProcessEnded in listening.messages
    (line,) = [record.message for record in caplog.records if "hears no more" in record.message]
    assert "no number" in line
    assert len(site.agents.listeners) == 1
    site.close()


def test_an_agent_that_cannot_run_is_a_launch_that_failed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.start("true", PYTHONHOME="/nowhere")
    happened = [site.next(), site.next(), site.next()]
    assert {type(event) for event in happened} == {LaunchFailed, AllRanksEnded, StoreHostEnded}
    (failed,) = (event for event in happened if isinstance(event, LaunchFailed))
    assert "agent-here.log" in failed.why


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_kill_before_there_is_an_agent_ends_the_attempt(number: signal.Signals, new_site: NewSite) -> None:
    site = new_site(store="sleep 600")
    step = site.start("echo started")
    step.send_signal(number)
    on_not_started = site.next()
    assert isinstance(on_not_started, RanksExited)
    assert (on_not_started.ranks, on_not_started.how) == ((0,), "killed before it was started")
    assert site.next() == AllRanksEnded(-number)
    assert not site.run.rank_log(1, 0).exists()


def test_what_the_store_is_told_goes_through_and_it_ends_when_it_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where the agent, and what it starts, are too
    site = Site(tmp_path, store=f"echo $$ > pid; {STORE}")
    site.start("sleep 600")
    site.store.propose("stop", by="a test")
    told = tmp_path / "told"
    await_true(lambda: told.exists() and told.read_text() == '{"propose": "stop", "by": "a test"}\n')
    site.store.close()
    await_true(lambda: gone(int((tmp_path / "pid").read_text())))
    site.close()
    assert site.events.empty()


def test_a_store_that_ends_by_itself_is_reported(new_site: NewSite) -> None:
    site = new_site(store=STORE.partition(";")[0] + "; exit 3")
    site.start("sleep 600")
    assert site.next() == StoreHostEnded(3)


def test_everything_ends_with_the_launcher(tmp_path: Path) -> None:
    site = Site(tmp_path)
    note = tmp_path / "pid"
    start_sleeper(site, note)
    agent = site.agent
    site.close()
    await_true(lambda: gone(agent) and gone(int(note.read_text())))


def call(site: Site) -> socket.socket:
    return socket.create_connection(site.agents._at.listening.getsockname(), timeout=TIMEOUT_S)


def is_closed(connection: socket.socket) -> bool:
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    return True


def test_strangers_get_nothing_and_change_nothing(
    new_site: NewSite, change_limits: ChangeLimits, caplog: pytest.LogCaptureFixture
) -> None:
    """They send nothing, garbage, or half a frame or one too long. They are more than the limit allows."""
    change_limits(stranger_s=0.5, most_strangers=8)
    site = new_site()
    step = site.start("sleep 600")
    await_true(lambda: site.store.port == 7)
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
    for connection in (*strangers, *flood):
        with connection:
            assert is_closed(connection)
    # Nor do they fill the disk with what the supervisor says of them.
    assert len([line for line in caplog.messages if line.startswith("a connection that is not an agent's")]) == 1
    step.send_signal()
    assert [type(site.next()), type(site.next())] == [RanksExited, AllRanksEnded]


class Connected(AgentUser):
    """Notes the hosts whose agents have connected, have sent something or have ended."""

    def __init__(self) -> None:
        self.hosts: SimpleQueue[str] = SimpleQueue()

    def agent_connected(self, host: str) -> None:
        self.hosts.put(host)

    def take_message(self, host: str, message: Any) -> None:
        self.hosts.put(host)

    def agent_ended(self, host: str, why: str) -> None:
        self.hosts.put(host)


@contextlib.contextmanager
def returning(folder: Path, *hosts: str) -> Iterator[tuple[Agents, Connected, dict[str, tuple[socket.socket, Any]]]]:
    """The agents of ``hosts``, which all connect, and then return to another supervisor."""
    starter: Any = SimpleNamespace(note_connected=lambda host: None, close=lambda: None)
    run, user = rundir.create("agents", folder), Connected()
    at = Endpoint.listen(run, ["here"], os.environ)
    at.secret_file.write_bytes(at.secret)
    site = Agents(run, Allocation(hosts, (1,) * len(hosts), 1), starter, at)
    site.listen(os.environ, SimpleQueue(), user, again=True)
    with contextlib.ExitStack() as stack:
        stack.callback(at.listening.close)
        stack.callback(site.disconnect)
        connections = [
            stack.enter_context(socket.create_connection(at.listening.getsockname(), TIMEOUT_S)) for _ in hosts
        ]
        played = {}
        for host, connection in zip(hosts, connections, strict=True):
            agent = AuthenticatedConnection(at.secret, "agent")
            agent.receive(connection.recv(32, socket.MSG_WAITALL))
            connection.sendall(agent.greeting + agent.send(AgentHere(host, 0, again=True)))
            played[host] = connection, agent
        assert {user.hosts.get(timeout=TIMEOUT_S) for _ in hosts} == {*hosts}
        yield site, user, played


def test_all_agents_of_a_large_job_may_connect_before_one_of_them_has_spoken(tmp_path: Path) -> None:
    """They start at the same moment. Before, all but 256 were refused at once, and their nodes had no agents."""
    with returning(tmp_path, *(f"node{number}" for number in range(400))) as (site, _, _):
        assert len(site.hosts) == 400


def test_a_node_that_is_given_up_as_it_sends_something_does_not_break_the_rest(tmp_path: Path) -> None:
    """Before, its connection was closed twice. That ended the thread, and with it the supervisor."""
    with returning(tmp_path, "node1", "node2") as (site, user, played):
        with site.lock:
            for connection, agent in played.values():
                connection.sendall(agent.send(AgentSignalled()))
            time.sleep(0.2)  # the thread has seen that both have sent something, and waits for the lock
            site.drop("node2", "given up")
        assert [user.hosts.get(timeout=TIMEOUT_S) for _ in range(2)] == ["node2", "node1"]
        assert site.hosts == {"node1"}


def test_the_words_of_an_agent_can_be_replayed_by_nobody(site: Site) -> None:
    """An agent's messages are worthless on another connection. The supervisor's random bytes are part of the keys."""
    site.start("sleep 600")
    await_true(lambda: site.store.port == 7)
    (peer,) = site.agents._peers.values()
    overheard = AuthenticatedConnection(peer.link._secret, "agent")
    overheard.receive(peer.link.greeting)
    words = overheard.greeting + overheard.send(AgentHere("here", 0, again=False))
    with call(site) as stranger:
        stranger.sendall(words)
        assert is_closed(stranger)


def test_an_agent_that_was_given_up_as_late_leaves_and_the_one_started_instead_stays(site: Site) -> None:
    """Before, the late agent took the other's place. It ended for want of an inbox, and the ranks were lost."""
    site.start("sleep 600")
    await_true(lambda: site.store.port == 7)
    late = AuthenticatedConnection(site.endpoint.secret, "agent")
    with call(site) as connection:
        late.receive(connection.recv(32, socket.MSG_WAITALL))
        connection.sendall(late.greeting + late.send(AgentHere("here", 1, again=False)))
        orders: list[Any] = []
        while not orders:
            orders, _ = late.receive(connection.recv(1 << 16))
    assert orders == [LeaveOrder()]
    assert site.agents.hosts == {"here"}
    assert not gone(site.agent)


def opened(site: Site, **environ: str) -> None:
    site.prepare({**os.environ, **environ})


def check(site: Site, command: Sequence[str]) -> None:
    site.agents.request({"here": CheckOrder(tuple(command))}, site.events)


def test_an_agent_has_its_node_checked_and_tells_its_clock(site: Site) -> None:
    before = time.time()
    opened(site)
    check(site, ["sh", "-c", "echo $PPID is well"])
    answered = site.next()
    assert isinstance(answered, NodeAnswered)
    checked = answered.message
    assert isinstance(checked, CheckAnswered)
    assert (answered.host, checked.text) == ("here", f"{site.agent} is well\n")
    assert before < answered.asked < checked.began < checked.ended < answered.received


def test_checks_that_cannot_be_started_say_so(site: Site) -> None:
    opened(site)
    check(site, ["/no/such/program"])
    assert "/no/such/program" in site.next().message.text


def test_checks_that_hang_keep_nothing_from_starting(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    site = Site(tmp_path)
    opened(site)
    check(site, ["sh", "-c", f"echo $$ > {note}.new; mv {note}.new {note}; exec sleep 600"])
    await_true(note.exists)
    site.start("echo started")
    assert site.next() == AllRanksEnded(0)
    assert not gone(int(note.read_text())), "a rank's end is not theirs"
    site.close()
    await_true(lambda: gone(int(note.read_text())))


def test_checks_are_over_with_their_line_whatever_still_hangs(site: Site) -> None:
    """A process with a thread that waits for a dead file server cannot end."""
    opened(site)
    check(site, ["sh", "-c", "echo a warning; echo '{}'; exec sleep 600"])
    assert site.next().message.text == "a warning\n{}\n"


@pytest.mark.parametrize("is_late", [True, False])
def test_of_a_node_without_an_agent_it_is_said_why_whenever_it_is_asked(site: Site, is_late: bool) -> None:
    opened(site, PYTHONHOME="/nowhere")
    if is_late:
        await_true(lambda: bool(site.agents._missing))
    check(site, ["true"])
    silent = site.next()
    assert isinstance(silent, NodeSilent)
    assert (silent.host, silent.is_certain) == ("here", True)
    assert "exit code 1" in silent.why


def test_an_agent_that_ends_in_the_middle_of_the_checks_is_no_certain_answer(site: Site, tmp_path: Path) -> None:
    note = tmp_path / "there"
    opened(site)
    check(site, ["sh", "-c", f"touch {note}; exec sleep 600"])
    await_true(note.exists)
    os.kill(site.agent, signal.SIGKILL)
    silent = site.next()  # by its connection, or by its process: which of the two is seen first is open
    assert re.match(r"its agent (has ended|ended with exit code -9: see .*agent-here\.log)$", silent.why)
    assert silent == NodeSilent("here", silent.why, is_certain=False)


def test_an_agent_names_the_addresses_that_do_not_answer(site: Site) -> None:
    """The kernel lets a connection wait while the listener's queue is full."""
    opened(site)
    check(site, ["echo", "here"])
    site.next()
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.create_server(("127.0.0.9", 0), backlog=0))
        for _ in range(3):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(full.getsockname())
        await_true(lambda: "127.0.0.9" in wire_protocol.unanswered())
        site.agents.ask_for_unanswered()
        told = site.next()
    assert told.host == "here"
    assert "127.0.0.9" in told.message.addresses
    assert site.agents.host_at("127.0.0.1") == "here"


REPORTS = """
import os, time
from toolkit.nodes.agent.reports import RankReport
from toolkit.nodes.agent.reports import VARIABLE, Outbox, addresses

rank, outbox = int(os.environ["RANK"]), Outbox(addresses(os.environ[VARIABLE]))

def report(phase, step, **more):
    assert outbox.send(RankReport(1, rank, phase, step, 0, **more).as_bytes(), 20.0)

"""


def reporting(folder: Path, lines: str) -> str:
    """Return the command of a rank that imports no torch. It reports as the toolkit's ranks do."""
    script = folder / "rank.py"
    script.write_text(REPORTS + lines)
    return f"PYTHONPATH={Path(agents.__file__).parents[3]} exec {sys.executable} {script}"


def until(site: Site, kind: type[Any]) -> list[Any]:
    """Return the events up to the next one of this kind."""
    happened = [site.next()]
    while not isinstance(happened[-1], kind):
        happened.append(site.next())
    return happened


def test_what_ranks_report_is_told_before_their_end(new_site: NewSite, tmp_path: Path) -> None:
    """All reports of rank 0 arrive even where ranks end at once. So do the first reports of the others."""
    site = new_site(ranks=3)
    lines = """
if rank == 0:
    report("in a step", 7, fields={"step": 7, "loss": 0.5})
    report("finishing", 8, result={"step": 8})
elif rank == 1:
    report("in a step", 7)
"""
    site.start(reporting(tmp_path, lines))
    happened = until(site, AllRanksEnded)
    assert happened[-1] == AllRanksEnded(0), site.log(0)
    told = [event for event in happened if isinstance(event, RankReport)]
    assert [(report.fields, report.result) for report in told] == [
        ({"step": 7, "loss": 0.5}, None),
        (None, {"step": 8}),
    ]
    first = [event for event in happened if isinstance(event, RanksReporting)]
    assert {rank for event in first for rank in event.ranks} == {0, 1}
    assert {(event.attempt, event.host) for event in first} == {(1, "here")}


@as_root
def test_an_agent_whose_name_another_user_has_taken_has_another_one(site: Site, tmp_path: Path) -> None:
    site.start("sleep 600")
    names = addresses(site.agents.reports_token)
    with contextlib.closing(Outbox(names[:1])) as outbox:
        assert outbox.send(b"no report", TIMEOUT_S)
    os.kill(site.agent, signal.SIGKILL)
    until(site, AllRanksEnded)
    site.store.close()
    with another_user("listen", names[:1]):
        site.start(reporting(tmp_path, 'report("in a step", 7)'))
        happened = until(site, AllRanksEnded)
    assert happened[-1] == AllRanksEnded(0), site.log(0)


def test_each_second_the_progress_of_all_ranks_of_a_node_is_one_message(new_site: NewSite, tmp_path: Path) -> None:
    site = new_site(ranks=3)
    site.start(reporting(tmp_path, 'report("in a step", 7 + rank)\ntime.sleep(600)'))

    def all_three() -> ProgressSummary | None:
        event = until(site, Progress)[-1]
        return event.digest if event.digest.ranks == 3 else None

    digest = wait_for(all_three, TIMEOUT_S, "the reports of all")
    assert (digest.attempt, digest.moves, digest.least, digest.most) == (1, 3, 7, 9)


def test_a_program_that_tells_what_ranks_do_gets_what_the_agent_knows_of_them(
    new_site: NewSite, tmp_path: Path
) -> None:
    site = new_site(ranks=2)
    site.start(reporting(tmp_path, 'rank == 0 and report("in a step", 7)\ntime.sleep(600)'))
    until(site, RanksReporting)
    unknown = tuple(RankProgress(rank, None, None, 40.0, False) for rank in range(2))
    order = StacksOrder(1, ("sh", "-c", "printf [; cat; printf ]"), str(site.run.path), unknown)
    answer = site.agents.ask({"here": order}, TIMEOUT_S)["here"]
    assert isinstance(answer, StacksAnswered)
    reported, has_not = StacksOrder.from_json(answer.groups[0]).rank_progress
    assert (reported.phase, reported.step, has_not) == ("in a step", 7, unknown[1])


def test_an_agent_that_starts_at_this_moment_is_waited_for(site: Site) -> None:
    site.start("sleep 600")
    answers = site.agents.ask(dict.fromkeys(("here", "away"), ReportsOrder()), TIMEOUT_S)
    assert list(answers) == ["here"]


def test_an_agent_that_has_ended_is_not_waited_for(site: Site) -> None:
    site.start("sleep 600")
    await_true(lambda: bool(site.agents.hosts))
    os.kill(site.agent, signal.SIGSTOP)
    Timer(0.2, os.kill, (site.agent, signal.SIGKILL)).start()
    assert site.agents.ask(dict.fromkeys(("here", "away"), ReportsOrder()), 10 * TIMEOUT_S) == {}


def test_ranks_that_srun_has_started_notice_when_the_agent_has_lost_the_supervisor(site: Site) -> None:
    """No other process would end these ranks."""
    site.start("sleep 600")
    await_true(lambda: bool(site.agents.hosts))
    outbox = Outbox(addresses(site.agents.reports_token))
    report = RankReport(1, 5, "in a step", 7, 0).as_bytes()
    assert outbox.send(report, TIMEOUT_S)
    until(site, RanksReporting)
    site.agents.drop("here", "lost")

    def is_refused() -> bool:
        try:
            return not outbox.send(report)
        except AgentGoneError:
            return True

    await_true(is_refused)
    outbox.close()


def test_a_report_that_is_none_is_ignored(site: Site, tmp_path: Path) -> None:
    site.start(reporting(tmp_path, 'outbox.send(b"[" * 1000, 20.0)\nreport("in a step", 7)'))
    happened = until(site, AllRanksEnded)
    assert [event.step for event in happened if isinstance(event, RankReport)] == [7]
    assert "an invalid report was ignored" in (site.run.logs / "agent-here.log").read_text()


@pytest.fixture
def agents_survive_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let agents outlive the thread that started them, which here is the supervisor's."""
    monkeypatch.setattr(children, "with_death_signal", lambda command, *_, **__: command)


@pytest.mark.usefixtures("agents_survive_threads")
def test_ranks_of_a_dead_supervisor_have_ended_before_the_agent_serves_the_next_one(site: Site, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    start_sleeper(site, note, "$$ $TOOLKIT_STATE_MEMORY")
    pid, memory = note.read_text().split()
    agent = site.agent
    site.die()
    site.begin()
    site.prepare({**os.environ, "MASTER_ADDR": "127.0.0.1"})
    assert gone(int(pid))
    site.start(f"echo $TOOLKIT_STATE_MEMORY > {note}")
    assert site.next() == AllRanksEnded(0)  # nothing is heard of the first attempt
    assert note.read_text() == f"{memory}\n"  # the state of its ranks is where it was
    assert site.agent == agent


@pytest.mark.usefixtures("agents_survive_threads")
def test_an_agent_that_does_not_return_is_replaced(
    new_site: NewSite, tmp_path: Path, change_limits: ChangeLimits
) -> None:
    change_limits(agents_return_s=0.1)
    site, note = new_site(), tmp_path / "pid"
    start_sleeper(site, note)
    os.kill(site.agent, signal.SIGSTOP)
    site.die()
    site.begin()
    site.prepare({**os.environ, "MASTER_ADDR": "127.0.0.1"})
    site.start("true")
    assert site.next() == AllRanksEnded(0)
    assert gone(int(note.read_text()))


@pytest.mark.usefixtures("agents_survive_threads")
@pytest.mark.parametrize("is_guarded", [True, False])
def test_an_agent_ends_when_no_other_supervisor_comes(
    tmp_path: Path, is_guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    hasty = "import sys; from toolkit.nodes.agent import node; node.NEXT_WITHIN_S = 0.5; node.main(sys.argv[1:])"
    usual = agent_starters._command
    command = [sys.executable, "-P", "-c", hasty]
    monkeypatch.setattr(agent_starters, "_command", lambda *arguments: [*command, *usual(*arguments)[4:]])
    site, note = Site(tmp_path), tmp_path / "pid"
    start_sleeper(site, note)
    if not is_guarded:
        site.endpoint.listening.close()
    site.die()
    await_true(lambda: gone(int(note.read_text())))
    await_true(lambda: gone(site.agent))
    site.endpoint.listening.close()
