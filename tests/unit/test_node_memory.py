"""How much memory a process may take, by files as Linux writes them, and by those of this machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from toolkit import node_memory

MIB = 1 << 20
V1_UNLIMITED = 0x7FFFFFFFFFFFF000


@pytest.mark.parametrize(
    ("own", "groups", "total", "left"),
    [
        ("0::/job/step", {}, 4000, 1000),
        ("0::/job/step", {"job/step": ("max", 5)}, 4000, 1000),
        ("0::/job/step", {"job/step": ("max", 5), "job": (64, 24)}, 64, 40),
        ("0::/job/step", {"job": (64, 65)}, 64, 0),
        ("0::/job/step", {"job": (9000, 24)}, 4000, 1000),
        ("0::/job", {"other": (1, 0)}, 4000, 1000),
        ("4:cpu:/x\n9:hugetlb,memory:/job/step", {"memory/job": (64, 14), "memory/x": (1, 0)}, 64, 50),
        ("9:memory:/job", {"memory": (V1_UNLIMITED // MIB, 1)}, 4000, 1000),
        ("damaged", {}, 4000, 1000),
    ],
    ids=["none", "max", "of a parent", "over", "above the node's", "another's", "version 1", "v1 no limit", "damaged"],
)
def test_the_least_limit_of_the_node_and_its_own_groups_counts(
    tmp_path: Path, own: str, groups: dict[str, tuple[str | int, int]], total: int, left: int
) -> None:
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: {4000 * 1024} kB\nMemFree: 3 kB\nMemAvailable: {1000 * 1024} kB\n")
    (proc / "self/cgroup").write_text(f"{own}\n")
    for name, (limit, used) in groups.items():
        folder = tmp_path / "groups" / name
        folder.mkdir(parents=True, exist_ok=True)
        limit_file, use_file = "memory.max", "memory.current"
        if name.startswith("memory"):
            limit_file, use_file = "memory.limit_in_bytes", "memory.usage_in_bytes"
        (folder / limit_file).write_text(f"{limit if limit == 'max' else int(limit) * MIB}\n")
        (folder / use_file).write_text(f"{used * MIB}\n")
    assert node_memory.total_bytes(proc, tmp_path / "groups") == total * MIB
    assert node_memory.available_bytes(proc, tmp_path / "groups") == left * MIB


def test_this_machine_has_no_more_than_the_c_library_says() -> None:
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < node_memory.total_bytes() <= physical
    assert 0 < node_memory.available_bytes() <= physical
