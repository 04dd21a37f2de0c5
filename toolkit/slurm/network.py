"""Which interface carries the traffic between ranks.

The routing table decides on the interface, not a name: the kernel is asked which of this node's addresses it would use
towards the peer, and the interface that owns this address is the answer.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from toolkit.base import logs
from toolkit.base.errors import ToolkitError

SYSFS = Path("/sys")

log = logs.get(__name__)


@dataclass(frozen=True)
class Interface:
    """A network interface."""

    name: str
    operstate: str
    speed_mbps: int | None  #: None where the driver does not know it
    address: str | None = None  #: where the interface was found by it


def interface_for(peer: str, sysfs: Path = SYSFS) -> Interface:
    """Return the interface of this node that reaches ``peer``, an address or a host name.

    Where the peer is this very node, it is the interface that owns the peer's address: the kernel would route to itself
    through ``lo``, which no other node can reach. ``lo`` is the answer only for a peer on it, such as 127.0.0.1.
    """
    address = _source_address(peer)
    name = _owner(address)
    if name is None:
        raise ToolkitError(
            f"the address {address}, from which {peer} is reached, belongs to no interface of {socket.gethostname()}; "
            "set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME by hand"
        )
    return read_interface(sysfs, name, address)


def rank_address(environ: Mapping[str, str], peer: str) -> str:
    """Return this node's address on the interface of a rank with this environment, see `rank_network_environment`."""
    named = environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if not named:
        address = interface_for(peer).address
        assert address is not None
        return address
    # The user has named an interface: take its address, IPv4 before IPv6.
    try:
        index = socket.if_nametoindex(named)
    except OSError:
        raise ToolkitError(f"GLOO_SOCKET_IFNAME={named}: {socket.gethostname()} has no such interface") from None
    own = [each.address for each in _netlink_addresses() if each.interface == index]
    addresses = sorted(own, key=lambda address: ":" in address)
    if not addresses:
        raise ToolkitError(f"GLOO_SOCKET_IFNAME={named}: this interface of {socket.gethostname()} has no address")
    return addresses[0]


def wildcard() -> str:
    """Return the address that stands for all addresses of this node."""
    return "::" if socket.has_dualstack_ipv6() else "0.0.0.0"


def listen(address: str) -> socket.socket:
    """Return a listening socket on a free port of ``address``, which may be the wildcard."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=4096, dualstack_ipv6=address == "::")


def reachable_at(address: str) -> str:
    """Return the address by which this node itself reaches what listens on ``address``."""
    return "localhost" if address in ("::", "0.0.0.0") else address


def job_address(here: str, hosts: Iterable[str], environ: Mapping[str, str]) -> str:
    """Return this node's address on the network that the ranks on ``hosts`` share.

    ``here`` is this node. For one node the address is the loopback: what listens there is not offered to other
    networks. If the host names lead to more than one network, or to none, it is the wildcard, with a warning. Only the
    first and the last of the other hosts are looked up: a look-up of each would take long.
    """
    # A single node's ranks need no network.
    others = [host for host in hosts if host != here]
    if not others:
        return "127.0.0.1"
    try:
        (address,) = {rank_address(environ, peer) for peer in {others[0], others[-1]}}
    except (ToolkitError, ValueError) as error:
        log.warning("listening on all addresses: no single one leads to %s and %s: %s", others[0], others[-1], error)
        return wildcard()
    return address


def plain_address(address: str) -> str:
    """Return ``address`` without its scope. An IPv4 address in an IPv6 form becomes IPv4."""
    parsed = ipaddress.ip_address(_plain(address))
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return str(mapped or parsed)


def rank_network_environment(environ: Mapping[str, str], peer: str, sysfs: Path = SYSFS) -> dict[str, str]:
    """Return NCCL's and gloo's interface for one rank, found on its node, where the user has not set them.

    Without the prefix ``=`` NCCL matches by prefix, and ``eth1`` would take ``eth10`` too.
    """
    if {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"} <= environ.keys():
        return {}
    found = interface_for(peer, sysfs)
    wanted = {"NCCL_SOCKET_IFNAME": f"={','.join(_rails(found, sysfs))}", "GLOO_SOCKET_IFNAME": found.name}
    return {name: value for name, value in wanted.items() if name not in environ}


def _rails(first: Interface, sysfs: Path) -> list[str]:
    """Return the interfaces that are as good as ``first``, which is among them: hsn0 to hsn3 of a Slingshot node.

    They have its name but for the number, its speed, and an address in its network: NCCL connects the first of one node
    to the first of another, the second to the second. gloo uses one alone.
    """
    addresses = [*_netlink_addresses()]
    own = next((each for each in addresses if each.address == first.address), None)
    # Of link-local addresses every interface has one.
    if own is None or first.speed_mbps is None or ipaddress.ip_address(own.address).is_link_local:
        return [first.name]
    stem = first.name.rstrip("0123456789")
    near = [socket.if_indextoname(each.interface) for each in addresses if each.network == own.network]
    rails = [read_interface(sysfs, name) for name in dict.fromkeys(near) if name.rstrip("0123456789") == stem]
    equal = [rail.name for rail in rails if rail.operstate == first.operstate and rail.speed_mbps == first.speed_mbps]
    return sorted({first.name, *equal}, key=lambda name: (len(name), name))


# --------------------------------------------------------------------------------------------------------- sysfs


def read_sysfs(path: Path) -> str:
    """Return a sysfs file's text; empty where the driver answers with an error, as for the speed of a downed link."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def read_interface(sysfs: Path, name: str, address: str | None = None) -> Interface:
    folder = sysfs / "class/net" / name
    speed = read_sysfs(folder / "speed")
    # The kernel writes -1 for a speed that it does not know.
    is_known = speed.isdigit() and int(speed) > 0
    return Interface(name, read_sysfs(folder / "operstate") or "unknown", int(speed) if is_known else None, address)


# ------------------------------------------------------------------------------------------------------ addresses


#: An address that no host has (RFC 5737): the way there is the default route.
_ELSEWHERE = (socket.AF_INET, "192.0.2.1")


def _source_address(peer: str) -> str:
    """Return our address on the way to ``peer``. The first of the peer's addresses with a route counts."""
    failures = []
    try:
        resolved = socket.getaddrinfo(peer, None, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError) as error:
        raise ToolkitError(
            f"the host name {peer!r} does not resolve on {socket.gethostname()} ({error}); "
            "check /etc/hosts and the name server of this node"
        ) from error
    addresses: list[tuple[socket.AddressFamily, str]] = [
        (family, str(sockaddr[0])) for family, _, _, _, sockaddr in resolved
    ]
    routable = [(family, address) for family, address in addresses if not _is_loopback(address)]
    if routable or _is_loopback(peer) or peer.split(".")[0] == "localhost":
        candidates = routable or addresses
    else:
        # Debian maps a node's own name to 127.0.1.1, where no other node finds it: prefer the default route, if any.
        candidates = [_ELSEWHERE, *addresses]
    for family, target in candidates:
        try:
            # To connect a UDP socket chooses the route, and so our address on it. It sends nothing.
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((target, 9))
                return _plain(str(probe.getsockname()[0]))
        except OSError as error:
            failures.append(f"{target}: {error.strerror}")
    raise ToolkitError(f"no route to {peer} from {socket.gethostname()} ({'; '.join(failures)}); check its interfaces")


def _is_loopback(peer: str) -> bool:
    """True if ``peer`` is an address of the loopback; a name is not."""
    try:
        return ipaddress.ip_address(_plain(peer)).is_loopback
    except ValueError:
        return False


def _plain(address: str) -> str:
    """Return an address without its scope: ``fe80::1%eth0`` is ``fe80::1``."""
    return address.partition("%")[0]


def _owner(address: str) -> str | None:
    """Return the interface that has ``address``; all of 127.0.0.0/8 belongs to ``lo``."""
    for each in _netlink_addresses():
        if each.address == address:
            return socket.if_indextoname(each.interface)
    return "lo" if _is_loopback(address) else None


#: From linux/rtnetlink.h and linux/if_addr.h; Python's socket module does not name them.
_RTM_NEWADDR, _RTM_GETADDR, _NLMSG_DONE, _NLM_F_REQUEST_DUMP = 20, 22, 3, 0x301
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_HEADER, _IFADDRMSG, _ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=BBBBI"), struct.Struct("=HH")


class _Address(NamedTuple):
    address: str
    interface: int  #: its index
    prefix: int  #: bits of the address that name its network

    @property
    def network(self) -> object:
        return ipaddress.ip_interface(f"{self.address}/{self.prefix}").network


def _netlink_addresses() -> Iterator[_Address]:
    """Yield this node's addresses of all families, as the kernel dumps them."""
    request = _IFADDRMSG.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
    header = _HEADER.pack(_HEADER.size + len(request), _RTM_GETADDR, _NLM_F_REQUEST_DUMP, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
        kernel.settimeout(5)
        kernel.sendto(header + request, (0, 0))
        while True:
            for kind, body in _messages(kernel.recv(1 << 16)):
                if kind == _NLMSG_DONE:
                    return
                if kind == _RTM_NEWADDR:
                    family, prefix, _, _, index = _IFADDRMSG.unpack_from(body)
                    position = _IFADDRMSG.size
                    while position + _ATTRIBUTE.size <= len(body):
                        length, attribute = _ATTRIBUTE.unpack_from(body, position)
                        # On a point-to-point link IFA_ADDRESS is the other end; our own is IFA_LOCAL, which IPv6
                        # does not send.
                        if attribute == (_IFA_LOCAL if family == socket.AF_INET else _IFA_ADDRESS):
                            address = socket.inet_ntop(family, body[position + _ATTRIBUTE.size : position + length])
                            yield _Address(address, index, prefix)
                        position += _aligned(length)


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= _HEADER.size:
        length, kind, *_ = _HEADER.unpack_from(data)
        yield kind, data[_HEADER.size : length]
        data = data[_aligned(length) :]


def _aligned(length: int) -> int:
    return max(4, (length + 3) & ~3)
