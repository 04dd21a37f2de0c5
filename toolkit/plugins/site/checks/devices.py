"""Checks whether the GPUs are there and empty, and which InfiniBand ports are up.

Interfaces and InfiniBand ports, read from sysfs, are only reported: NCCL finds ACTIVE ports and the topology by itself,
and a list of ours would switch that off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from toolkit.devices import on_node
from toolkit.devices.kinds import GPUS, PART, visible_words
from toolkit.devices.on_node import Gpus, GpusError
from toolkit.plugins.node_watch.sysfs import open_gpus
from toolkit.plugins.site.checks import Finding, ok
from toolkit.slurm.network import SYSFS, Interface, read_interface, read_sysfs

#: Shares of a GPU's memory. The driver itself takes some hundred MiB; more than these shares belongs to a process.
LEFTOVER_WARNING, LEFTOVER_BAD = 0.02, 0.10

Opener = Callable[[Mapping[str, str]], Gpus | None]


def check_gpus(
    asked: int, environ: Mapping[str, str], open_gpus: Opener = open_gpus, root: Path = Path("/")
) -> list[Finding]:
    """Compare the visible GPUs with those asked for. Report what others have left in their memory."""
    if asked == 0:
        return []
    try:
        gpus = open_gpus(environ)
    except GpusError as error:
        return [Finding("gpus", "bad", f"0 of {asked}", f"{error}; the driver is not well: have the node drained")]
    # The devices that variables name for this process, of whichever maker; None if none is set.
    levels = [level for kind in GPUS for level in visible_words(kind, environ)]
    named = min((words for _, words in levels), key=len, default=None)
    # A part of a GPU counts as one. The memory of its GPU is used by other jobs, too.
    if any(word.startswith(PART) for word in named or ()):
        return [_count(asked, len(named or ()), environ)]
    if gpus is None:
        there = on_node.device_files(root)
        return [_count(asked, there if named is None else min(there, len(named)), environ)]
    counted = _count(asked, sum(gpu.devices for gpu in gpus.gpus), environ)
    return [replace(counted, text=counted.text or gpus.cannot_tell), _leftovers(gpus)]


def _count(asked: int, there: int, environ: Mapping[str, str]) -> Finding:
    if there >= asked:
        return ok("gpus", str(there))
    text = (
        f"only {there} of the {asked} GPUs asked for are visible: {on_node.described(environ)}; `dmesg` on the node "
        "has details; have it drained"
    )
    return Finding("gpus", "bad", f"{there} of {asked}", text)


def _leftovers(gpus: Gpus) -> Finding:
    """Return a finding on memory that is in use, with the processes that the driver names."""
    loads = {gpu.index: (gpu, gpus.utilization(gpu)) for gpu in gpus.gpus}
    used = {
        index: (load.memory_bytes or 0, (load.memory_bytes or 0) / load.total_memory_bytes)
        for index, (_, load) in loads.items()
        if load.total_memory_bytes
    }
    worst = max((share for _, share in used.values()), default=0.0)
    if worst < LEFTOVER_WARNING:
        return ok("gpu memory", f"{worst:.0%}")
    occupied = {index: size for index, (size, share) in used.items() if share >= LEFTOVER_WARNING}
    pids = [pid for index in occupied for pid in gpus.processes(loads[index][0])]
    named = "".join(f"; pid {pid} {_command(pid)}" for pid in pids[:3])
    words = ", ".join(f"GPU {index}: {size / 2**30:.1f} GiB" for index, size in occupied.items())
    text = f"GPU memory is in use already ({words}{named}): end what uses it, or have the node drained"
    return Finding("gpu memory", "bad" if worst >= LEFTOVER_BAD else "warning", f"{worst:.0%}", text)


def _command(pid: int) -> str:
    """Return the first words of a process's command; empty where it is hidden from us."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:60].strip()
    return ""


def check_infiniband(sysfs: Path = SYSFS) -> list[Finding]:
    """Return the ACTIVE ports. Nodes are compared by their number, which a port that is down changes."""
    if not (sysfs / "class/infiniband").is_dir():
        return []
    ports = infiniband_ports(sysfs)
    figure = ",".join(f"{port.device}:{port.port}" for port in ports) or "none active"
    return [ok("infiniband", figure, float(len(ports)))]


@dataclass(frozen=True)
class IbPort:
    """An RDMA port as sysfs shows it."""

    device: str
    port: int
    state: str  #: "ACTIVE"
    rate_gbps: float
    link_layer: str  #: "InfiniBand" or "Ethernet" (RoCE)
    netdev: str | None  #: the interface over the same port, e.g. "ib0"


def interfaces(sysfs: Path = SYSFS) -> list[Interface]:
    """Return every interface of this node, by name."""
    return [read_interface(sysfs, path.name) for path in _entries(sysfs / "class/net")]


def infiniband_ports(sysfs: Path = SYSFS) -> list[IbPort]:
    """Return the ACTIVE ports, by device and port. A port that is down or being configured is not listed."""
    ports = []
    for device in _entries(sysfs / "class/infiniband"):
        for port in _entries(device / "ports"):
            state = read_sysfs(port / "state").rpartition(":")[2].strip()  # of ``4: ACTIVE``
            if state == "ACTIVE":
                number, layer = int(port.name), read_sysfs(port / "link_layer")
                rate_gbps = float(read_sysfs(port / "rate").split(" ")[0] or 0)  # of ``400 Gb/sec (4X NDR)``
                ports.append(IbPort(device.name, number, state, rate_gbps, layer, _netdev(device, number)))
    return ports


def _entries(folder: Path) -> list[Path]:
    """Return the directories in ``folder`` in natural order (mlx5_2 before mlx5_10), if it exists."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if path.is_dir()), key=lambda path: (len(path.name), path.name))


def _netdev(device: Path, port: int) -> str | None:
    """Return the interface over the same port.

    RoCE names it in the port's first GID. For IPoIB it is the device's interface with this port's ``dev_port``.
    """
    named = read_sysfs(device / f"ports/{port}/gid_attrs/ndevs/0")
    if named:
        return named
    for netdev in _entries(device / "device/net"):
        number = read_sysfs(netdev / "dev_port")
        if not number.isdigit() or int(number) == port - 1:
            return netdev.name
    return None
