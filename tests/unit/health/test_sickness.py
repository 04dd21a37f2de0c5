"""What counts as sick, on a made-up node: folders in place of ``/sys`` and ``/tmp``, lines in place of nvidia-smi's."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from toolkit.health import sickness
from toolkit.health.sickness import FULL_LOOKS, HOT_LOOKS, LOOK_EVERY_S, LOOKS_PER_GPU_LOOK, SLOW_GPU_LOOKS, Sickness

WELL = "0, 0, Not Active"


class Node:
    """A node's counters, and what its GPUs say."""

    def __init__(self, root: Path) -> None:
        self._devices = root / "sys/devices/system"
        (root / "tmp").mkdir()
        self.gpus: list[str] = []
        self.times_asked = 0
        self.heat(0)
        self.write("edac/mc/mc0/ue_count", 2)
        self.sickness = Sickness(root, self.ask)

    def write(self, name: str, value: int | str) -> None:
        path = self._devices / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")

    def heat(self, count: int) -> None:
        self.write("cpu/cpu1/thermal_throttle/core_throttle_count", count)

    def ask(self) -> list[str]:
        self.times_asked += 1
        return self.gpus

    def look(self, times: int = 1) -> list[str]:
        return [finding for _ in range(times) for finding in self.sickness.look()]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_nothing_is_wrong_with_a_node_whose_counters_stand_still(node: Node) -> None:
    node.gpus = ["0, 7, Not Active", "1, [N/A], [N/A]"]
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


def test_a_gpu_is_asked_at_most_once_a_minute(node: Node) -> None:
    node.look(10)
    assert node.times_asked == 5
    assert LOOK_EVERY_S * LOOKS_PER_GPU_LOOK >= 60


def test_gpu_memory_that_fails_is_told_with_its_gpu(node: Node) -> None:
    node.gpus = [WELL, "1, 5, Not Active"]
    node.look()
    node.gpus = [WELL, "1, 6, Not Active"]
    assert node.look(4) == ["uncorrected memory errors (ECC of GPU 1)"]


def test_a_gpu_that_slows_itself_down_for_minutes_is_told(node: Node) -> None:
    node.gpus = ["0, 0, Active"]
    assert node.look(LOOKS_PER_GPU_LOOK * (SLOW_GPU_LOOKS - 1)) == []
    assert node.look(LOOKS_PER_GPU_LOOK) == ["GPU 0 slowed down by heat or power"]


@pytest.mark.parametrize("error", [FileNotFoundError("nvidia-smi"), subprocess.CalledProcessError(9, "nvidia-smi")])
def test_a_node_without_gpus_or_with_a_failing_driver_is_watched_as_well(tmp_path: Path, error: Exception) -> None:
    def fail() -> list[str]:
        raise error

    node = Node(tmp_path)
    node.sickness = Sickness(tmp_path, fail)
    node.look()
    node.write("edac/mc/mc0/ue_count", 3)
    assert node.look(2) == ["uncorrected memory errors (mc0 of EDAC)"]


def test_a_disk_that_stays_full_is_told(node: Node, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    free = sickness.LEAST_FREE_BYTES
    monkeypatch.setattr(os, "statvfs", lambda folder: SimpleNamespace(f_bavail=free // 512, f_frsize=512))
    assert node.look(2 * FULL_LOOKS) == []
    free -= 512
    assert node.look(FULL_LOOKS - 1) == []
    assert node.look() == [f"no room on {tmp_path / 'tmp'}"]
