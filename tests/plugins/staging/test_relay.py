"""Packages that nodes take from each other. Real processes copy over the loopback; the test plays some of the nodes."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any, ClassVar

import pytest

from tests.plugins.staging.test_copying import content, killed_at, packed
from tests.waiting import PATIENCE
from toolkit.nodes.agent.helpers import Helpers
from toolkit.nodes.agent.link import Message, StrangerError
from toolkit.plugins.staging import copying, relay, whole
from toolkit.plugins.staging.copying import CopyRequest
from toolkit.plugins.staging.node_side import CopyKeeper
from toolkit.plugins.staging.package import Package
from toolkit.plugins.staging.relay import NodeAddress, Relay, RelayPeer, RelayRequest
from toolkit.plugins.staging.supervisor_side import CopyOrder

SECRET = b"s" * 32
MB = 1 << 20


class Cluster:
    """The copying parts of several nodes' agents. Each node has a disk of its own; real processes copy."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.selector = folder, selectors.DefaultSelector()
        self.helpers = Helpers(self.selector)
        self.keepers: list[CopyKeeper] = []

    def until(self, condition: Callable[[], Any], limit_s: float = 40.0) -> None:
        end = time.monotonic() + PATIENCE * limit_s
        while not condition():
            assert time.monotonic() < end
            for key, _ in self.selector.select(0.05):
                key.data()

    def close(self) -> None:
        for pid in self.helpers.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for key in [*self.selector.get_map().values()]:
            end: Any = key.fileobj
            end.close()
        for keeper in self.keepers:
            if keeper._relay is not None:
                keeper._relay.close()


class Node:
    """A node of the cluster: its disk, its copies and its agent's messages."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster, self.name, self.disk = cluster, name, cluster.folder / name
        self.disk.mkdir()
        self.sent: list[Message] = []
        self.copies: dict[str, str] = {}
        played: Any = self  # in place of Processes
        self.keeper = CopyKeeper(cluster.helpers, played, self.sent.append, SECRET)
        cluster.keepers.append(self.keeper)
        address = self.keeper.listen("127.0.0.1")
        assert address is not None
        self.address = address

    def use_copies(self, paths: dict[str, str]) -> None:
        self.copies |= paths

    def stage(self, *packages: Package, above: list[Message], is_above: bool = True) -> None:
        request = CopyRequest(packages, str(self.disk)).to_json()
        self.keeper.stage({"request": request, "wait_s": 0.0, "above": above, "is_above": is_above})

    @property
    def own(self) -> Path:
        return self.disk / f"toolkit-stage-{os.geteuid()}"

    @property
    def pid(self) -> int:
        """Return the process that copies: the only one with open files on this disk. 0 if there is none."""
        for pid in self.cluster.helpers.pids:
            with contextlib.suppress(OSError):
                handles = [handle.readlink() for handle in Path(f"/proc/{pid}/fd").iterdir()]
                if any(handle.is_relative_to(self.disk) for handle in handles):
                    return pid
        return 0

    def has_bytes(self, count: int) -> bool:
        """True if at least ``count`` bytes are unpacked."""
        with contextlib.suppress(FileNotFoundError):
            files = [path for folder in self.own.glob("*.partial") for path in folder.iterdir()]
            return sum(path.stat().st_size for path in files) >= count
        return False

    def is_done(self) -> bool:
        return bool(self.sent)

    def copy_of(self, made: Package) -> Path:
        assert self.sent == [{**self.sent[0], "problems": [], "damaged": []}]
        return Path(self.sent[0]["copies"][made.source])


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.close()
    PlayedNode.close_all()


@pytest.fixture
def made(tmp_path: Path) -> Package:
    """Pack a file of 8 MB."""
    (tmp_path / "data").write_bytes(os.urandom(8 * MB))
    return packed(tmp_path / "data", tmp_path / "cache")


class PlayedNode:
    """A node that the test plays. ``give`` gets the connection and the position from which the file is asked for."""

    all: ClassVar[list[socket.socket]] = []

    def __init__(self, give: Callable[[RelayPeer, int], None], secret: bytes = SECRET) -> None:
        self._listening, self._give, self._secret = socket.create_server(("127.0.0.1", 0)), give, secret
        self.all.append(self._listening)
        self.asked: list[int] = []
        self.address: Message = NodeAddress("127.0.0.1", self._listening.getsockname()[1]).to_json()
        Thread(target=self._serve, daemon=True).start()

    @classmethod
    def close_all(cls) -> None:
        for listening in cls.all:
            with contextlib.suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)  # ends the thread as well
            listening.close()
        cls.all.clear()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listening.accept()
                Thread(target=self._answer, args=[connection], daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, StrangerError):
            peer = RelayPeer(connection, self._secret, "giver")
            self.asked.append(int(json.loads(peer.receive())["position"]))
            self._give(peer, self.asked[-1])


def giving(data: bytes, end: int | None = None, then: Callable[[], object] = lambda: None) -> Callable[..., None]:
    def give(peer: RelayPeer, position: int) -> None:
        peer.send(b"")
        for start in range(position, len(data) if end is None else end, 1 << 18):
            peer.send(data[start : start + (1 << 18)][: None if end is None else end - start])
        then()

    return give


def elsewhere(made: Package) -> Package:
    """Return the package as seen from a node that cannot read the shared disk."""
    return made.replace(file="/nowhere/data")


@pytest.mark.parametrize("is_folder", [False, True])
def test_only_the_first_of_seven_nodes_reads_the_shared_disk(
    is_folder: bool, made: Package, cluster: Cluster, tmp_path: Path
) -> None:
    if is_folder:
        (tmp_path / "set/sub").mkdir(parents=True)
        for number in range(40):
            (tmp_path / f"set/sub/{number}").write_bytes(os.urandom(number * 9000))
        made = packed(tmp_path / "set", tmp_path / "cache")
    order = CopyOrder({})
    nodes = [Node(cluster, f"node{number}") for number in range(7)]
    for number, node in enumerate(nodes):
        above = order.place(node.address)
        # the other nodes cannot read the shared disk, so all their bytes come from nodes above
        node.stage(made if number == 0 else elsewhere(made), above=above, is_above=number < 3)
    cluster.until(lambda: all(node.is_done() for node in nodes))
    for node in nodes:
        copy = node.copy_of(made)
        assert copy.is_relative_to(node.disk)
        if is_folder:
            assert content(copy) == content(Path(made.source))
        else:
            assert copy.read_bytes() == Path(made.file).read_bytes()


@pytest.mark.parametrize("has_source", [True, False], ids=["the next above has the rest", "the disk has the rest"])
def test_a_node_whose_source_is_killed_goes_on_where_it_was(has_source: bool, made: Package, cluster: Cluster) -> None:
    data, may_end = Path(made.file).read_bytes(), Event()

    def give(peer: RelayPeer, position: int) -> None:
        first = len(first_node.asked) == 1
        if first:
            giving(data, 5 * MB, lambda: may_end.wait(60))(peer, position)
        elif position == 0 or has_source:
            giving(data)(peer, position)

    first_node = PlayedNode(give)
    between, last = Node(cluster, "between"), Node(cluster, "last")
    between.stage(elsewhere(made), above=[first_node.address])
    last.stage(elsewhere(made) if has_source else made, above=[between.address, first_node.address], is_above=False)
    if not has_source:  # what it has from the other node is right, on the disk that part is not
        damaged = bytearray(data)
        damaged[:MB] = bytes(MB)
        Path(made.file).write_bytes(damaged)
    cluster.until(lambda: between.has_bytes(3 * MB) and last.has_bytes(3 * MB))
    os.kill(between.pid, signal.SIGKILL)
    cluster.until(lambda: last.is_done() and between.is_done())
    may_end.set()
    assert last.copy_of(made).read_bytes() == data
    assert between.copy_of(made).read_bytes() == data  # the agent has started it again
    assert sorted(first_node.asked)[:2] == [0, 0]
    assert sorted(first_node.asked)[2] >= 3 * MB


def test_a_node_that_is_killed_takes_no_other_with_it(made: Package, cluster: Cluster) -> None:
    data, goes_on = Path(made.file).read_bytes(), Event()

    def give(peer: RelayPeer, position: int) -> None:
        giving(data, 5 * MB, lambda: goes_on.wait(60))(peer, position)
        for start in range(5 * MB, len(data), MB):
            peer.send(data[start : start + MB])

    first = PlayedNode(give)
    between, last = Node(cluster, "between"), Node(cluster, "last")
    between.stage(elsewhere(made), above=[first.address])
    last.stage(elsewhere(made), above=[between.address], is_above=False)
    cluster.until(lambda: last.has_bytes(3 * MB))
    # dies in the middle of the file, while its source still waits for the rest
    os.kill(last.pid, signal.SIGKILL)
    goes_on.set()
    cluster.until(lambda: last.is_done() and between.is_done())
    assert between.copy_of(made).read_bytes() == last.copy_of(made).read_bytes() == data
    assert first.asked == [0]


def wrong(peer: RelayPeer, position: int) -> None:
    peer.send(b"")
    for _ in range(8):
        peer.send(bytes(MB))


def silent(peer: RelayPeer, position: int) -> None:
    time.sleep(60)


def hanging(peer: RelayPeer, position: int) -> None:
    peer.send(b"")
    peer.send(bytes(10))  # wrong as well
    time.sleep(60)


def refusing(peer: RelayPeer, position: int) -> None: ...


@pytest.mark.parametrize("give", [wrong, hanging, silent, refusing])
def test_a_source_that_sends_wrong_data_or_nothing_is_given_up(
    give: Callable[[RelayPeer, int], None], made: Package, cluster: Cluster
) -> None:
    data = Path(made.file).read_bytes()
    source = PlayedNode(give)
    node = Node(cluster, "node")
    node.stage(made, above=[source.address])
    cluster.until(node.is_done)
    assert node.copy_of(made).read_bytes() == data
    assert source.asked == [0]


def test_a_node_that_does_not_know_the_secret_is_not_believed(made: Package, cluster: Cluster) -> None:
    source = PlayedNode(wrong, secret=b"t" * 32)
    gone = socket.create_server(("127.0.0.1", 0))
    address = NodeAddress("127.0.0.1", gone.getsockname()[1]).to_json()
    gone.close()
    node = Node(cluster, "node")
    node.stage(made, above=[address, source.address])
    cluster.until(node.is_done)
    assert node.copy_of(made).read_bytes() == Path(made.file).read_bytes()
    assert source.asked == []


def test_nobody_gets_data_without_the_secret(made: Package, cluster: Cluster) -> None:
    node = Node(cluster, "node")
    got: list[bytes] = []

    def ask() -> None:
        with socket.create_connection(("127.0.0.1", node.address["port"])) as connection:
            peer = RelayPeer(connection, b"t" * 32, "taker")
            # a well-formed request under a wrong secret
            peer._link.receive(greeting := connection.recv(32))
            connection.sendall(peer._link.send({"key": made.key, "position": 0}))
            got.append(greeting)
            with contextlib.suppress(ConnectionResetError):
                while data := connection.recv(MB):
                    got.append(data)
        got.append(b"end")

    node.stage(made, above=[])
    thread = Thread(target=ask, daemon=True)
    thread.start()
    cluster.until(lambda: not thread.is_alive() and node.is_done())
    assert [len(part) for part in got] == [32, 3]


def test_a_node_that_has_nothing_to_pass_on_is_not_waited_for(made: Package, cluster: Cluster) -> None:
    """The first node has a copy of an earlier job. The second has finished copying, and neither makes a third wait."""
    first, second, third = (Node(cluster, f"node{number}") for number in range(3))
    copying.copy(made, [first.disk])
    first.stage(made, above=[])
    second.stage(made, above=[first.address], is_above=False)
    cluster.until(lambda: first.is_done() and second.is_done())
    began = time.monotonic()
    third.stage(made, above=[second.address, first.address])
    cluster.until(third.is_done)
    assert time.monotonic() - began < relay.STALL_S
    assert third.copy_of(made).read_bytes() == Path(made.file).read_bytes()


def test_a_kill_at_any_write_leaves_no_torn_copy(tmp_path: Path) -> None:
    source, disk = tmp_path / "set", tmp_path / "disk"
    (source / "sub").mkdir(parents=True)
    for number in range(4):
        (source / f"sub/{number}").write_bytes(os.urandom(50_000))
    made = packed(source, tmp_path / "cache")
    disk.mkdir()
    own = disk / f"toolkit-stage-{os.geteuid()}"
    node = PlayedNode(giving(Path(made.file).read_bytes()))
    above = (NodeAddress.from_json(node.address),)
    _, channel = pair = socket.socketpair()

    def copy() -> None:
        request = RelayRequest(CopyRequest((made,)), above, True, SECRET.hex(), channel.fileno())
        Relay(request).copy(elsewhere(made), [disk])

    for number in itertools.count(1):
        was_killed = killed_at(number, copy)
        if whole.is_whole(own, made.key):
            assert content(own / made.key) == content(source)
        found = copying.copy(made, [disk])
        assert content(found.path) == content(source)
        assert not [path for path in own.iterdir() if made.key not in path.name]
        for lock in found.locks:
            os.close(lock)
        copying._remove(own, made.key)
        if not was_killed:
            break
    assert number > 20
    assert len(node.asked) > 15  # the others come before it asks
    for end in pair:
        end.close()


def test_a_node_keeps_blocks_in_memory_and_no_files(cluster: Cluster, tmp_path: Path) -> None:
    with (tmp_path / "big").open("wb") as file:
        for _ in range(160):
            file.write(os.urandom(MB))
    made = packed(tmp_path / "big", tmp_path / "cache")
    first, second = Node(cluster, "first"), Node(cluster, "second")
    first.stage(made, above=[])
    second.stage(elsewhere(made), above=[first.address])
    cluster.until(lambda: first.is_done() and second.is_done())
    for node in (first, second):
        status = Path(f"/proc/{node.pid}/status").read_text()
        (peak,) = (int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
        assert peak < 50 * 1024


def test_nodes_above_are_those_that_have_got_the_order_before() -> None:
    order, nodes = CopyOrder({}), [{"address": "a", "port": port} for port in range(7)]
    above = [order.place(None if node["port"] == 1 else node) for node in nodes]
    assert [[node["port"] for node in each] for each in above] == [[], [0], [0], [0], [0], [2, 0], [2, 0]]
