"""The interfaces of this node and its InfiniBand ports, read from sysfs.

They are only reported: NCCL finds ACTIVE ports and the topology by itself, and a list of ours would switch that off.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from toolkit.slurm.network import SYSFS, Interface, read_interface, read_sysfs


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
    ports = [
        _read_port(sysfs, device, port)
        for device in _entries(sysfs / "class/infiniband")
        for port in _entries(device / "ports")
    ]
    return [port for port in ports if port.state == "ACTIVE"]


def _entries(folder: Path) -> list[Path]:
    """Return the directories in ``folder`` in natural order (mlx5_2 before mlx5_10), if it exists."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if path.is_dir()), key=lambda path: (len(path.name), path.name))


def _read_port(sysfs: Path, device: Path, port: Path) -> IbPort:
    """Read a port. ``state`` holds ``4: ACTIVE`` and ``rate`` holds ``400 Gb/sec (4X NDR)``."""
    rate = read_sysfs(port / "rate").split(" ")[0]
    return IbPort(
        device=device.name,
        port=int(port.name),
        state=read_sysfs(port / "state").rpartition(":")[2].strip(),
        rate_gbps=float(rate or 0),
        link_layer=read_sysfs(port / "link_layer"),
        netdev=_netdev(device, int(port.name)),
    )


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
