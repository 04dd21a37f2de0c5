"""InfiniBand ports and interfaces by trees as the mlx5 driver shows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.plugins.site.checks.devices import IbPort, infiniband_ports, interfaces


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")


def port(device: str, state: str, rate: str, layer: str, number: int = 1) -> dict[str, str]:
    folder = f"class/infiniband/{device}/ports/{number}"
    return {f"{folder}/state": state, f"{folder}/rate": rate, f"{folder}/link_layer": layer}


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """Write a tree in which mlx5_0 is up, mlx5_1 is down, and mlx5_10 is RoCE."""
    write(
        tmp_path,
        {
            **port("mlx5_0", "4: ACTIVE", "400 Gb/sec (4X NDR)", "InfiniBand"),
            "class/infiniband/mlx5_0/device/net/ib0/dev_port": "0",
            **port("mlx5_1", "1: DOWN", "10 Gb/sec (4X SDR)", "InfiniBand"),
            **port("mlx5_10", "4: ACTIVE", "2.5 Gb/sec (1X SDR)", "Ethernet"),
            "class/infiniband/mlx5_10/ports/1/gid_attrs/ndevs/0": "eth1",
            "class/net/lo/operstate": "unknown",
            "class/net/eth0/operstate": "up",
            "class/net/eth0/speed": "100000",
            "class/net/ib0/operstate": "down",
            "class/net/ib0/speed": "-1",
        },
    )
    return tmp_path


def test_only_active_ports_are_listed_with_their_rate_and_interface(sysfs: Path) -> None:
    assert infiniband_ports(sysfs) == [
        IbPort("mlx5_0", 1, "ACTIVE", 400.0, "InfiniBand", "ib0"),
        IbPort("mlx5_10", 1, "ACTIVE", 2.5, "Ethernet", "eth1"),
    ]


def test_the_ports_of_one_device_have_interfaces_of_their_own(sysfs: Path) -> None:
    write(sysfs, port("mlx5_0", "4: ACTIVE", "400 Gb/sec (4X NDR)", "InfiniBand", number=2))
    write(sysfs, {"class/infiniband/mlx5_0/device/net/ib1/dev_port": "1"})
    assert [found.netdev for found in infiniband_ports(sysfs)] == ["ib0", "ib1", "eth1"]


def test_a_node_without_infiniband_has_no_ports(tmp_path: Path) -> None:
    assert infiniband_ports(tmp_path) == []
    assert interfaces(tmp_path) == []


def test_interfaces_tell_speed_where_the_driver_knows_it(sysfs: Path) -> None:
    found = {interface.name: (interface.operstate, interface.speed_mbps) for interface in interfaces(sysfs)}
    assert found == {"lo": ("unknown", None), "eth0": ("up", 100_000), "ib0": ("down", None)}
