"""Interfaces by the kernel's own ``/proc``."""

import errno
import math
import os
import resource
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.process_limits import ChangeLimits
from tests.scale.dead_nodes import HERE, silent_network, silent_nodes
from toolkit.base import this_node
from toolkit.base.errors import ToolkitError
from toolkit.slurm import network, reachable
from toolkit.slurm.network import interface_for, rank_network_environment
from toolkit.slurm.reachable import unreachable


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")


@pytest.mark.parametrize("peer", ["127.0.0.1", "localhost", "127.0.0.77"])
def test_a_peer_on_the_loopback_is_reached_through_lo(peer: str) -> None:
    assert interface_for(peer).name == "lo"


def outside_address() -> tuple[str, str]:
    """Return an address of this machine off the loopback, and its interface. From the routes in /proc."""
    for line in Path("/proc/net/route").read_text().splitlines()[1:]:
        name, destination = line.split()[:2]
        if destination == "00000000":
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, name.encode())
                probe.connect(("198.51.100.1", 9))
                return probe.getsockname()[0], name
    pytest.skip("this machine has no default route")


def test_a_peer_elsewhere_is_reached_through_the_interface_of_its_route() -> None:
    address, name = outside_address()
    found = interface_for("198.51.100.1")
    assert (found.name, found.address) == (name, address)


def test_a_peer_on_this_node_is_reached_by_the_interface_that_has_its_address() -> None:
    address, name = outside_address()
    assert interface_for(address).name == name


def test_an_own_name_that_means_only_loopback_gives_the_interface_others_can_reach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, name = outside_address()
    debian = [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: debian)
    assert interface_for("mynode").name == name


def test_an_own_name_on_a_machine_without_a_way_out_gives_lo(monkeypatch: pytest.MonkeyPatch) -> None:
    debian = [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: debian)

    class NoWayOut(socket.socket):
        def connect(self, address: Any) -> None:
            if not address[0].startswith("127."):
                raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))
            super().connect(address)

    monkeypatch.setattr(socket, "socket", NoWayOut)
    assert interface_for("mynode").name == "lo"


def test_a_name_that_does_not_resolve_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(ToolkitError, match="'nodeX' does not resolve"):
        interface_for("nodeX")


def test_the_rank_environment_matches_the_interface_exactly() -> None:
    found = rank_network_environment({}, "127.0.0.1")
    assert found == {"NCCL_SOCKET_IFNAME": "=lo", "GLOO_SOCKET_IFNAME": "lo"}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, "=hsn0,hsn1,hsn2,hsn10"),
        ({"class/net/hsn1/speed": "100000"}, "=hsn0,hsn2,hsn10"),
        ({"class/net/hsn2/operstate": "down"}, "=hsn0,hsn1,hsn10"),
        ({"class/net/hsn0/speed": "-1"}, "=hsn0"),  # nothing can be compared
    ],
)
def test_nccl_gets_all_rails_of_equal_speed_in_one_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, str], expected: str
) -> None:
    """As on nodes with several Slingshot cards. gloo uses one interface alone."""
    names = ["hsn0", "hsn10", "hsn2", "hsn1", "nmn0", "hsn3"]
    addresses = [network._Address(f"10.253.0.{index}", index, 16) for index in range(5)]
    addresses += [network._Address("10.9.0.1", 5, 16)]  # hsn3 is in another network
    monkeypatch.setattr(network, "_netlink_addresses", lambda: iter(addresses))
    monkeypatch.setattr(socket, "if_indextoname", lambda index: names[index])
    monkeypatch.setattr(network, "_source_address", lambda peer: "10.253.0.0")
    for name in names:
        write(tmp_path, {f"class/net/{name}/operstate": "up", f"class/net/{name}/speed": "200000"})
    write(tmp_path, changed)
    found = rank_network_environment({}, "nid000001", tmp_path)
    assert found == {"NCCL_SOCKET_IFNAME": expected, "GLOO_SOCKET_IFNAME": "hsn0"}


def test_what_the_user_set_is_left_alone() -> None:
    assert rank_network_environment({"NCCL_SOCKET_IFNAME": "ib"}, "127.0.0.1") == {"GLOO_SOCKET_IFNAME": "lo"}
    both = {"NCCL_SOCKET_IFNAME": "ib", "GLOO_SOCKET_IFNAME": "ib0"}
    assert rank_network_environment(both, "no such host") == {}


def test_a_job_of_one_node_needs_no_address_but_the_loopback() -> None:
    assert network.job_address("n1", ["n1"], {}) == "127.0.0.1"


@pytest.mark.parametrize(
    ("ways", "address"),
    [({"n2": "10.0.0.1", "n9": "10.0.0.1"}, "10.0.0.1"), ({"n2": "10.0.0.1", "n9": "192.168.0.1"}, None), ({}, None)],
    ids=["one network", "two networks", "names that do not resolve"],
)
def test_a_job_listens_on_its_own_network_or_where_there_is_no_one_says_so(
    ways: dict[str, str], address: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def way(environ: object, peer: str) -> str:
        if peer not in ways:
            raise ToolkitError(f"the host name {peer!r} does not resolve")
        return ways[peer]

    monkeypatch.setattr(network, "rank_address", way)
    assert network.job_address("n1", ["n1", "n2", "n5", "n9"], {}) == (address or network.wildcard())
    assert ("listening on all addresses" in caplog.text) == (address is None)


def test_what_listens_on_one_address_is_not_reached_by_another() -> None:
    with network.listen("127.0.0.1") as one, network.listen(network.wildcard()) as every:
        socket.create_connection(("127.0.0.1", one.getsockname()[1]), timeout=5).close()
        socket.create_connection(("127.0.0.2", every.getsockname()[1]), timeout=5).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", one.getsockname()[1]), timeout=5)


@pytest.mark.parametrize(
    ("address", "plain"), [("10.0.0.1", "10.0.0.1"), ("::ffff:10.0.0.1", "10.0.0.1"), ("fe80::1%eth0", "fe80::1")]
)
def test_one_address_is_one_text(address: str, plain: str) -> None:
    assert network.plain_address(address) == plain


THERE = "127.0.0.2"
SOFT_BEFORE = resource.getrlimit(resource.RLIMIT_NOFILE)[0]


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """Listen on this node, and on no other."""
    with socket.create_server((HERE, 0)) as listener:
        yield listener


def test_who_accepts_a_connection_is_there(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    with socket.create_server((THERE, port)):
        assert unreachable([THERE], port, here=HERE) == set()
    assert unreachable([THERE], port, here=HERE) == {THERE}


def test_a_name_that_nobody_knows_is_not_there(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    name = "no.such.host.invalid"
    with pytest.raises(socket.gaierror) as told:
        socket.getaddrinfo(name, port)
    # Where no name server answers, the name counts as not asked.
    assert unreachable([name], port, here=HERE) == ({name} if told.value.errno == socket.EAI_NONAME else set())


def test_where_not_even_our_own_node_answers_nothing_is_known(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    listener.close()
    assert unreachable([THERE], port, here=HERE) == set()


@pytest.fixture
def full() -> Iterator[int]:
    with silent_network() as port:
        yield port


def test_thousands_of_silent_nodes_are_asked_at_once(full: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the real kernel. Before, 32 were asked at a time: 939 s for a network that was away."""
    nodes, waves, ask = silent_nodes(3000), list[int](), reachable._ask
    monkeypatch.setattr(reachable, "_ask", lambda wave, timeout_s: waves.append(len(wave)) or ask(wave, timeout_s))
    assert unreachable(nodes, full, here=HERE, timeout_s=0.5) == set(nodes)
    at_once = this_node.max_open_files() - 2 * reachable.KEPT_FREE
    assert len(waves) <= math.ceil(len(nodes) / at_once)
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert soft == SOFT_BEFORE


def test_of_ten_thousand_nodes_none_is_dead_that_could_not_be_asked(full: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine runs out of descriptors. Then its name server cannot answer for some names."""
    nodes = silent_nodes(10_000)
    asked = set(nodes[:50])

    class Scarce(socket.socket):
        made = 0

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            Scarce.made += 1
            if Scarce.made > 1 + len(asked):
                raise OSError(errno.EMFILE, "Too many open files")
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(socket, "socket", Scarce)
    assert unreachable(nodes, full, here=HERE, timeout_s=0.2) == asked

    def away(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", away)
    assert unreachable(nodes[:99], full, here=HERE, timeout_s=0.2) == set()


def test_a_name_that_the_name_server_does_not_tell_in_time_is_not_dead(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch, change_limits: ChangeLimits
) -> None:
    released, look_up = threading.Event(), socket.getaddrinfo

    def slow(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "slow":
            released.wait(20)
        return look_up(HERE if name == "slow" else name, *args, **kwargs)

    change_limits(look_up_s=0.2)
    monkeypatch.setattr(socket, "getaddrinfo", slow)
    assert unreachable(["slow", THERE], listener.getsockname()[1], here=HERE) == {THERE}
    released.set()
