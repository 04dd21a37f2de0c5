"""The checks of one node, with facts of nodes other than the test machine."""

import errno
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from toolkit.base.errors import ToolkitError
from toolkit.devices.on_node import Gpus, GpusError, Load, WatchedGpu
from toolkit.plugins.node_watch.nvml import is_visible
from toolkit.plugins.site.checks import ANSWER_HEAD, CheckAnswer, Finding, devices, host
from toolkit.plugins.site.checks.devices import IbPort, infiniband_ports, interfaces
from toolkit.plugins.site.checks.verdict import NodeCheck, judge
from toolkit.slurm import network

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(("usable", "severity"), [(8, "ok"), (64, "ok"), (7, "bad"), (1.5, "bad")])
def test_fewer_cpus_than_the_ranks_need_are_bad(usable: float, severity: str) -> None:
    found = host.check_cpus(8, usable)
    assert found.severity == severity
    assert severity == "ok" or f"only {usable:g} of the 8 CPUs" in found.text


def test_this_process_may_use_what_its_affinity_says() -> None:
    ours = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, [min(ours)])
        assert host.usable_cpus() <= 1
    finally:
        os.sched_setaffinity(0, ours)


def test_the_quota_of_every_cgroup_above_counts(tmp_path: Path) -> None:
    folder = tmp_path / "system.slice/slurmd/job_1"
    folder.mkdir(parents=True)
    (folder / "cpu.max").write_text("max 100000\n")
    (folder.parent / "cpu.max").write_text("150000 100000\n")
    assert list(host.cpu_quotas("0::/system.slice/slurmd/job_1\n", tmp_path)) == [1.5]


def test_cgroup_1_has_its_quota_in_two_files(tmp_path: Path) -> None:
    folder = tmp_path / "cpu/slurm/job_1"
    folder.mkdir(parents=True)
    for name, value in {"cpu.cfs_quota_us": "200000", "cpu.cfs_period_us": "100000"}.items():
        (folder / name).write_text(f"{value}\n")
    groups = "4:memory:/slurm/job_1\n3:cpu,cpuacct:/slurm/job_1\n"
    assert list(host.cpu_quotas(groups, tmp_path)) == [2.0]


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    folder = tmp_path / "run/.preflight"
    folder.mkdir(parents=True)
    (folder / host.TOKEN).write_text("word")
    return folder


def test_the_same_folder_is_read_and_answered(shared: Path) -> None:
    assert host.check_shared(shared, "word", "node1").severity == "ok"
    assert (shared / "node1").read_text() == "word"


def missing(shared: Path) -> None:
    for path in (*shared.iterdir(), shared, shared.parent):
        path.unlink() if path.is_file() else path.rmdir()


def other(shared: Path) -> None:
    (shared / host.TOKEN).unlink()


def changed(shared: Path) -> None:
    (shared / host.TOKEN).write_text("an older word")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (missing, "does not exist here: its file system is not mounted"),
        (other, "is another folder here than on the batch host, or a stale one"),
        (changed, "has other content here"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_wrong_with_a_shared_folder_is_told_apart(
    shared: Path, damage: Callable[[Path], None], words: str
) -> None:
    damage(shared)
    found = host.check_shared(shared, "word", "node1")
    assert found.severity == "bad"
    assert words in found.text


@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.ESTALE, "handle is stale"), (errno.EROFS, "read-only"), (errno.ENOSPC, "full"), (errno.EIO, "looked at")],
)
def test_an_error_of_the_file_system_comes_with_advice(
    shared: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", refuse)
    found = host.check_shared(shared, "word", "node1")
    assert found.severity == "bad"
    assert os.strerror(number) in found.text
    assert words in found.text


def test_a_file_that_is_seen_late_is_seen(shared: Path) -> None:
    late = shared / "late"
    writer = threading.Timer(0.1, lambda: late.write_text("word"))
    writer.start()
    assert host.wait_for_text(late, "word", within_s=10) == "word"
    writer.join()


def disk(free_bytes: float, inodes: int, total_inodes: int = 10**6) -> Callable[[Path], os.statvfs_result]:
    stat = os.statvfs_result((4096, 4096, 10**9, 0, int(free_bytes) // 4096, total_inodes, inodes, inodes, 0, 255))
    return lambda _: stat


@pytest.mark.parametrize(
    ("stat", "severity"),
    [
        (disk(2**40, 10**6), "ok"),
        (disk(500 * 2**20, 10**6), "warning"),
        (disk(50 * 2**20, 10**6), "bad"),
        (disk(2**40, 5000), "warning"),
        (disk(2**40, 3), "bad"),
        (disk(2**40, 0, total_inodes=0), "ok"),  # btrfs counts none
    ],
)
def test_room_is_bytes_and_inodes(
    monkeypatch: pytest.MonkeyPatch, stat: Callable[[Path], os.statvfs_result], severity: str
) -> None:
    monkeypatch.setattr(os, "statvfs", stat)
    assert host.check_space("temp space", Path("/tmp")).severity == severity


def four(environ: Mapping[str, str], used: Sequence[int] = (4, 4, 4, 4), users: Sequence[int] = ()) -> Gpus:
    """Play a node with four H100 of which a variable may hide some. ``used`` is in MiB."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")

    class Four:
        cannot_tell = ""
        gpus = tuple(WatchedGpu(i, i, "H100") for i in range(4) if is_visible(i, f"GPU-{i}a5c", visible))

        def utilization(self, gpu: WatchedGpu) -> Load:
            return Load(0.0, used[gpu.index] << 20, None, None, 81559 << 20)

        def processes(self, gpu: WatchedGpu) -> Sequence[int]:
            return users

    found: Any = Four()
    return found


def by_check(found: Sequence[Finding]) -> dict[str, Finding]:
    return {finding.check: finding for finding in found}


@pytest.mark.parametrize(
    ("asked", "environ", "severity", "figure"),
    [
        (4, {}, "ok", "4"),
        (2, {"CUDA_VISIBLE_DEVICES": "1,3"}, "ok", "2"),
        (2, {"CUDA_VISIBLE_DEVICES": "GPU-0a5c,GPU-2"}, "ok", "2"),
        (2, {"CUDA_VISIBLE_DEVICES": "0, GPU-2a5c"}, "ok", "2"),
        (2, {"CUDA_VISIBLE_DEVICES": "MIG-41b3,MIG-GPU-0a5c/1/0"}, "ok", "2"),
        (8, {}, "bad", "4 of 8"),
        (4, {"CUDA_VISIBLE_DEVICES": "0,1"}, "bad", "2 of 4"),
        (4, {"CUDA_VISIBLE_DEVICES": ""}, "bad", "0 of 4"),
    ],
)
def test_gpus_are_counted_as_cuda_will(asked: int, environ: Mapping[str, str], severity: str, figure: str) -> None:
    found = by_check(devices.check_gpus(asked, environ, four))["gpus"]
    assert (found.severity, found.figure) == (severity, figure)


def test_memory_that_somebody_left_is_named_with_its_owner() -> None:
    left = partial(four, used=(4, 40_000, 4, 4), users=[os.getpid()])
    found = by_check(devices.check_gpus(4, {}, left))["gpu memory"]
    assert found.severity == "bad"
    assert "GPU 1: 39.1 GiB" in found.text
    program = Path("/proc/self/cmdline").read_text().partition("\0")[0]
    assert f"pid {os.getpid()} {program}" in found.text


def test_memory_of_gpus_that_are_not_ours_is_not_ours_to_judge() -> None:
    found = devices.check_gpus(2, {"CUDA_VISIBLE_DEVICES": "0,2"}, partial(four, used=(4, 40_000, 4, 4)))
    assert [finding.severity for finding in found] == ["ok", "ok"]


def test_what_a_driver_does_not_tell_is_a_note_and_no_warning() -> None:
    gpus = four({})
    gpus.cannot_tell = "nothing of its fans"
    found = devices.check_gpus(4, {}, lambda _: gpus)
    report = judge([NodeCheck("n1", found), NodeCheck("n2", found)], 0.1)
    assert report.is_fine
    assert report.summary() == ["checks of 2 nodes: 0 bad, 0 with warnings (0.1 s)", "note: nothing of its fans"]


def test_a_driver_that_fails_is_bad() -> None:
    def fail(_: object) -> Gpus:
        raise GpusError("nvmlInit_v2 failed with code 9")

    (found,) = devices.check_gpus(4, {}, fail)
    assert found.severity == "bad"
    assert "code 9" in found.text


def test_where_no_driver_answers_device_files_are_counted(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    (found,) = devices.check_gpus(2, {}, lambda _: None, tmp_path)
    assert (found.severity, found.figure) == ("ok", "2")


def test_a_node_that_is_asked_for_no_gpus_has_nobody_asked() -> None:
    def never(_: object) -> Gpus:
        raise AssertionError

    assert devices.check_gpus(0, {}, never) == []


def test_the_active_infiniband_ports_are_the_figure(tmp_path: Path) -> None:
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / f"class/infiniband/{name}/ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text(state)
    (found,) = devices.check_infiniband(tmp_path)
    assert (found.figure, found.value) == ("mlx5_0:1", 1.0)


def test_a_slow_look_up_is_a_warning_with_its_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 110.2])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    found = host.check_look_up("10.0.0.1", lambda _: None)
    assert found.severity == "warning"
    assert "took 10.2 s" in found.text


def test_an_address_without_a_name_is_fine() -> None:
    def unknown(_: str) -> None:
        raise socket.herror(1, "Unknown host")

    assert host.check_look_up("10.0.0.1", unknown).severity == "ok"


@pytest.mark.parametrize(("limit", "severity"), [(1024, "ok"), (-1, "ok"), (512, "warning"), (64, "bad")])
def test_open_files(limit: int, severity: str) -> None:
    assert host.check_open_files(limit).severity == severity


@pytest.mark.parametrize(
    ("limit", "gpus", "severity"), [(-1, 8, "ok"), (2**36, 8, "ok"), (65536, 8, "bad"), (65536, 0, "warning")]
)
def test_locked_memory_matters_to_nccl(limit: int, gpus: int, severity: str) -> None:
    assert host.check_locked_memory(gpus, limit).severity == severity


def test_the_users_interface_is_the_ranks_interface() -> None:
    assert network.rank_address({"GLOO_SOCKET_IFNAME": "lo"}, "192.0.2.1") == "127.0.0.1"
    with pytest.raises(ToolkitError, match="GLOO_SOCKET_IFNAME=nowhere0"):
        network.rank_address({"GLOO_SOCKET_IFNAME": "nowhere0"}, "192.0.2.1")


def answer(**request: object) -> CheckAnswer:
    """Return what one node prints, run as on a node."""
    content = {"folder": "/nowhere/.preflight", "token": "word", "cpus": [1], "peer": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-S", "-P", "-m", "toolkit.plugins.site.checks", json.dumps(content | request)],
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.startswith(ANSWER_HEAD)
    assert done.stdout.count("\n") == 1
    return CheckAnswer.parse(done.stdout)


def test_a_node_answers_once_with_all_its_findings_and_its_clock(shared: Path) -> None:
    asked = time.time()
    told = answer(folder=str(shared))
    assert told.node == socket.gethostname()
    assert asked < told.began < told.ended < time.time()
    checks = {finding.check for finding in told.findings} - {"gpus", "gpu memory", "infiniband", "memlock"}
    assert checks == {
        *("network", "look-up", "cpus", "open files"),
        *("shared folder", "run folder space", "temp space"),
    }
    assert {finding.check for finding in told.findings if finding.severity == "bad"} == set()


def test_a_file_system_that_hangs_hangs_nothing_else(shared: Path) -> None:
    """A fifo without a writer blocks its reader, as an absent file server does."""
    (shared / host.TOKEN).unlink()
    os.mkfifo(shared / host.TOKEN)
    found = {finding.check: finding for finding in answer(folder=str(shared), disk_limit_s=1.5).findings}
    assert "does not answer within 1.5 s" in found["shared folder"].text
    assert found["cpus"].severity == found["temp space"].severity == "ok"


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
