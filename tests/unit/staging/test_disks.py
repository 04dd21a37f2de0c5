"""How much memory copies may take: of what the node has, and of what the job's control groups leave."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.staging import disks

MIB = 1 << 20


@pytest.mark.parametrize(
    ("group", "files", "left"),
    [
        ("0::/job/step", {}, 1000),
        ("0::/job/step", {"job/step/memory.max": "max", "job/step/memory.current": 5 * MIB}, 1000),
        ("0::/job/step", {"job/memory.max": 64 * MIB, "job/memory.current": 24 * MIB}, 40),
        ("0::/job/step", {"job/memory.max": 64 * MIB, "job/memory.current": 65 * MIB}, 0),
        (
            "4:cpu:/x\n9:hugetlb,memory:/job/step",
            {"memory/job/memory.limit_in_bytes": 64 * MIB, "memory/job/memory.usage_in_bytes": 14 * MIB},
            50,
        ),
        (
            "9:memory:/job",
            {"memory/memory.limit_in_bytes": 0x7FFFFFFFFFFFF000, "memory/memory.usage_in_bytes": MIB},
            1000,
        ),
    ],
    ids=["no files", "no limit", "version 2", "over the limit", "version 1", "version 1 without a limit"],
)
def test_a_control_group_limits_the_memory_for_copies(
    tmp_path: Path, group: str, files: dict[str, object], left: int
) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable: {1000 * 1024} kB\n")
    (proc / "self/cgroup").write_text(f"{group}\n")
    for name, text in files.items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(f"{text}\n")
    assert disks.available_memory(proc, groups) == left * MIB


def test_copies_take_half_of_the_memory_that_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disks, "file_system", lambda folder: "tmpfs")
    monkeypatch.setattr(disks, "available_memory", lambda: 1000)
    assert disks.room_bytes(tmp_path) == 500
