"""The signs of a sick node, on a made-up one. Folders stand for ``/sys`` and ``/tmp``, and a library for NVIDIA's."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.plugins.node_watch.conftest import FakeDriver
from toolkit.devices.on_node import GpuHealth, Gpus, GpusError, Load, WatchedGpu
from toolkit.plugins.node_watch import monitor_program
from toolkit.plugins.node_watch.monitor_program import (
    FULL_LOOKS,
    HOT_LOOKS,
    LOOK_EVERY_S,
    LOOKS_PER_GPU_LOOK,
    SLOW_GPU_LOOKS,
    NodeHealthMonitor,
)
from toolkit.plugins.node_watch.nvml import Nvml
from toolkit.plugins.node_watch.usage import JobProcesses, NodeSampler

#: What two GPUs tell that are well, and work.
WELL = {
    **dict.fromkeys(("ecc", "rows", "recovery", "reasons"), (0, 0)),
    **dict.fromkeys(("width", "most_width"), (16, 16)),
    **dict.fromkeys(("generation", "most_generation"), (5, 5)),
    "busy": (100, 100),
}


class Node:
    """A node's counters, and the figures of its GPUs."""

    def __init__(self, root: Path, gpus: Gpus | None = None) -> None:
        self._devices = root / "sys/devices/system"
        (root / "tmp").mkdir()
        self.heat(0)
        self.write("edac/mc/mc0/ue_count", 2)
        self.sickness = NodeHealthMonitor(root, gpus)

    def write(self, name: str, value: int | str) -> None:
        path = self._devices / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")

    def heat(self, count: int) -> None:
        self.write("cpu/cpu1/thermal_throttle/core_throttle_count", count)

    def look(self, times: int = 1) -> list[str]:
        return [finding for _ in range(times) for finding in self.sickness.look()]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_nothing_is_wrong_with_a_node_whose_counters_stand_still(node: Node) -> None:
    node.heat(1_000_000)
    assert node.look(2 * HOT_LOOKS) == []


def test_memory_that_fails_is_told_once(node: Node) -> None:
    node.look()
    node.write("edac/mc/mc0/ue_count", 3)
    node.write("edac/mc/mc0/ce_count", 1000)  # corrected
    assert node.look(3) == ["uncorrected memory errors (mc0 of EDAC)"]
    node.write("edac/mc/mc0/ue_count", 4)
    assert node.look(3) == []


def test_processors_that_are_throttled_at_every_look_are_told_after_minutes(node: Node) -> None:
    node.look()
    for count in range(1, HOT_LOOKS):
        node.heat(count)
        assert node.look() == []
    node.heat(HOT_LOOKS)
    assert node.look() == ["processors throttled for heat"]


def test_processors_that_cool_down_in_between_are_well(node: Node) -> None:
    node.look()
    for count in range(3 * HOT_LOOKS):
        if count % HOT_LOOKS:  # it stands still once in a while
            node.heat(count)
        assert node.look() == []


MINUTES = LOOKS_PER_GPU_LOOK * SLOW_GPU_LOOKS


@pytest.fixture
def gpu_node(tmp_path: Path, driver: FakeDriver) -> Node:
    driver.tell({**WELL, "ecc": (7, 0)})
    return Node(tmp_path, Nvml(None, driver.library))


def test_gpus_are_asked_at_most_once_a_minute(gpu_node: Node, driver: FakeDriver) -> None:
    gpu_node.look()
    driver.tell({**WELL, "ecc": (8, 0)})
    assert gpu_node.look(LOOKS_PER_GPU_LOOK - 1) == []
    assert gpu_node.look() == ["uncorrected memory errors (ECC of GPU 0)"]
    assert LOOK_EVERY_S * LOOKS_PER_GPU_LOOK >= 60


def test_gpus_that_are_well_or_tell_nothing_are_not_sick(gpu_node: Node, driver: FakeDriver) -> None:
    assert gpu_node.look(3 * MINUTES) == []
    driver.tell({})  # nothing is supported
    assert gpu_node.look(3 * MINUTES) == []
    # Idle GPUs save power; idleness, a power cap by software and clocks set by an administrator are no faults.
    driver.tell({**WELL, "ecc": (7, 0), "generation": (1, 1), "busy": (0, 0), "reasons": (0x1 | 0x4 | 0x2, 0x100)})
    assert gpu_node.look(3 * MINUTES) == []


@pytest.mark.parametrize(
    ("values", "finding"),
    [
        ({"ecc": (7, 1)}, "uncorrected memory errors (ECC of GPU 1)"),
        ({"rows": (0, 2)}, "GPU 1 has remapped rows of its memory after uncorrected errors"),
        ({"failed": (1, 0)}, "GPU 0 has memory rows that could not be remapped"),
        ({"recovery": (1, 0)}, "GPU 0 needs a reset"),
        ({"recovery": (0, 2)}, "GPU 1 needs a reboot of the node"),
        ({"recovery": (5, 0)}, "GPU 0 needs its IMEX domain recovered, or a reset of its bus, by the driver's version"),
        ({"recovery": (0, 99)}, "GPU 1 needs recovery action 99"),
        ({"lost": (1, 0)}, "GPU 0 is lost: the driver cannot reach it"),
    ],
)
def test_a_gpu_that_fails_is_told_once(
    gpu_node: Node, driver: FakeDriver, values: dict[str, tuple[int, int]], finding: str
) -> None:
    gpu_node.look()
    driver.tell({**WELL, "ecc": (7, 0), **values})
    assert gpu_node.look(2 * MINUTES) == [finding]


@pytest.mark.parametrize(
    ("values", "finding"),
    [
        ({"reasons": (0x08, 0)}, "GPU 0 slowed down by heat or power"),
        ({"reasons": (0, 0x40)}, "GPU 1 slowed down by heat or power"),
        ({"reasons": (0, 0x80)}, "GPU 1 slowed down by heat or power"),
        ({"width": (16, 8)}, "GPU 1 has 8 of its 16 PCIe lanes"),
        ({"generation": (3, 5)}, "GPU 0 is linked by PCIe 3 and not 5 while it works"),
    ],
)
def test_a_gpu_that_stays_slow_for_minutes_is_told(
    gpu_node: Node, driver: FakeDriver, values: dict[str, tuple[int, int]], finding: str
) -> None:
    driver.tell({**WELL, "ecc": (7, 0), **values})
    assert gpu_node.look(MINUTES - LOOKS_PER_GPU_LOOK) == []
    driver.tell({**WELL, "ecc": (7, 0)})  # a break
    gpu_node.look(LOOKS_PER_GPU_LOOK)
    driver.tell({**WELL, "ecc": (7, 0), **values})
    assert gpu_node.look(MINUTES - LOOKS_PER_GPU_LOOK) == []
    assert gpu_node.look(LOOKS_PER_GPU_LOOK) == [finding]


def test_xid_errors_of_the_hardware_are_told_and_those_of_programs_are_not(gpu_node: Node, driver: FakeDriver) -> None:
    gpu_node.look(LOOKS_PER_GPU_LOOK)
    for gpu, number in ((0, 31), (1, 79), (0, 13), (0, 48)):
        driver.xid(gpu, number)
    assert gpu_node.look(LOOKS_PER_GPU_LOOK) == [
        "GPU 1: fallen off the bus (Xid 79)",
        "GPU 0: uncorrected memory error (Xid 48)",
    ]


class OtherGpus:
    """One GPU of a vendor that says little."""

    cannot_tell = "nothing of its fans"
    gpus = (WatchedGpu(0, handle="card0", model="MI300X"),)

    def __init__(self) -> None:
        self.joules = 0.0

    def utilization(self, gpu: WatchedGpu) -> Load:
        self.joules += 100.0
        return Load(busy=0.5, memory_bytes=7, power_w=None, energy_j=self.joules)

    def health(self, gpu: WatchedGpu) -> GpuHealth:
        return GpuHealth(needs="needs a reset", is_slowed=True)

    def link(self, gpu: WatchedGpu) -> tuple[int, int]:
        return 5, 16

    def processes(self, gpu: WatchedGpu) -> list[int]:
        return []

    def faults(self) -> list[str]:
        return ["GPU 0: fabric error"]


def test_gpus_of_another_vendor_are_a_class(tmp_path: Path) -> None:
    gpus = OtherGpus()
    assert Node(tmp_path, gpus).look(MINUTES) == [
        "GPU 0: fabric error",
        "GPU 0 needs a reset",
        "GPU 0 slowed down by heat or power",
    ]
    sampler = NodeSampler(JobProcesses(os.getpid(), {}), gpus)
    (used,) = sampler.sample().gpus
    assert (used.model, used.busy, used.energy_j, used.link) == ("MI300X", 0.5, 100.0, (5, 16))


def test_only_the_jobs_own_gpus_are_watched(tmp_path: Path, driver: FakeDriver) -> None:
    for visible, indices in {None: [0, 1], "1": [1], "GPU-00000000": [0], "": [], "MIG-7": [0, 1]}.items():
        assert [gpu.index for gpu in Nvml(visible, driver.library).gpus] == indices
    with pytest.raises(GpusError, match="libnone"):
        Nvml(None, "libnone.so")
    driver.tell({"init": (1, 1)})
    with pytest.raises(GpusError, match="code 9"):
        Nvml(None, driver.library)


def test_a_disk_that_stays_full_is_told(node: Node, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    free = monitor_program.LEAST_FREE_BYTES
    monkeypatch.setattr(os, "statvfs", lambda folder: SimpleNamespace(f_bavail=free // 512, f_frsize=512))
    assert node.look(2 * FULL_LOOKS) == []
    free -= 512
    assert node.look(FULL_LOOKS - 1) == []
    assert node.look() == [f"no room on {tmp_path / 'tmp'}"]
