"""How much memory a process may take. Read from files as Linux writes them, and from those of this machine."""

import os
from pathlib import Path

import pytest

from toolkit.base import this_node

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
    assert this_node.total_memory_bytes(proc, tmp_path / "groups") == total * MIB
    assert this_node.available_memory_bytes(proc, tmp_path / "groups") == left * MIB


@pytest.mark.parametrize(
    ("own", "folder", "prefix", "limit", "use"),
    [
        ("0::/job", "job", "", "memory.max", "memory.current"),
        ("9:memory:/job", "memory/job", "total_", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ],
    ids=["version 2", "version 1"],
)
def test_the_page_cache_is_free_and_shared_memory_is_not(
    tmp_path: Path, own: str, folder: str, prefix: str, limit: str, use: str
) -> None:
    """A job that reads more than its limit has a control group full of the pages that it has read."""
    proc, group = tmp_path / "proc", tmp_path / "groups" / folder
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: {4000 * 1024} kB\nMemAvailable: {1000 * 1024} kB\n")
    (proc / "self/cgroup").write_text(f"{own}\n")
    group.mkdir(parents=True)
    (group / limit).write_text(f"{64 * MIB}\n")
    (group / use).write_text(f"{63 * MIB}\n")
    mib = {"inactive_anon": 9, "active_anon": 4, "inactive_file": 30, "active_file": 20, "file": 59, "shmem": 9}
    (group / "memory.stat").write_text("".join(f"{prefix}{name} {size * MIB}\n" for name, size in mib.items()))
    assert this_node.available_memory_bytes(proc, tmp_path / "groups") == 51 * MIB


@pytest.mark.parametrize(
    ("own", "mount", "file", "kills"),
    [
        ("0::/job/step", "0 0 0:1 / {groups} rw - cgroup2 x rw", "job/step/memory.events", 3),
        ("9:memory:/job/step", "0 0 0:1 / {groups}/memory rw - cgroup x rw", "memory/job/step/memory.oom_control", 3),
        ("9:memory:/node/job", "0 0 0:1 /node {groups}/memory rw - cgroup x rw", "memory/job/memory.oom_control", 3),
        ("4:cpu:/job", "", "job/memory.events", 0),
    ],
    ids=["version 2", "version 1", "version 1 in a container", "none"],
)
def test_kills_for_lack_of_memory_are_counted(tmp_path: Path, own: str, mount: str, file: str, kills: int) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    (proc / "self").mkdir(parents=True)
    (proc / "self/cgroup").write_text(f"{own}\n")
    (proc / "self/mountinfo").write_text(mount.format(groups=groups) + "\n")
    (groups / file).parent.mkdir(parents=True)
    (groups / file).write_text("low 5\noom 7\noom_kill 3\n")
    assert this_node.oom_kills(proc, groups) == kills


def test_this_machine_has_no_more_than_the_c_library_says() -> None:
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < this_node.total_memory_bytes() <= physical
    assert 0 < this_node.available_memory_bytes() <= physical
