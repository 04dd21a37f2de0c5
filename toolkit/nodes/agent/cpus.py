"""Chooses the CPUs of each task of a node.

A task gets whole cores first, next to each other and near its GPU.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

TOPOLOGY = Path("/sys/devices/system/cpu")


def for_tasks(
    tasks: int, cpus_per_task: int | None, near_gpus: Sequence[Collection[int]] = ()
) -> list[list[int] | None]:
    """Return the CPUs of each of ``tasks``; None for all CPUs of this process.

    Each gets ``cpus_per_task`` of those that this process may use. Also None if there are fewer than the tasks need.
    ``near_gpus`` has the CPUs of each GPU's NUMA node, and each task takes those of its own GPU. Where these are too
    few it takes others of the same package, then any that are left. Without ``near_gpus`` the tasks take the CPUs one
    after the other.
    """
    ours = os.sched_getaffinity(0)
    if cpus_per_task is None or tasks * cpus_per_task > len(ours):
        return [None] * tasks
    packages = {cpu: _number(cpu, "physical_package_id", TOPOLOGY) for cpu in ours}
    # For each GPU three choices, from near to far: its NUMA node, its package, all.
    choices = []
    for near in near_gpus or [ours]:
        package = _number(min(near), "physical_package_id", TOPOLOGY)
        choices.append((near, [cpu for cpu in ours if packages[cpu] == package], ours))
    left, sets = by_core(ours), [list[int]() for _ in range(tasks)]
    for distance in range(3):  # every task takes near CPUs before any takes farther ones
        for task, own in enumerate(sets):
            choice = choices[task % len(choices)][distance]
            own += [cpu for cpu in left if cpu in choice][: cpus_per_task - len(own)]
            left = [cpu for cpu in left if cpu not in own]
    return [sorted(own) for own in sets]


def by_core(cpus: Iterable[int], topology: Path | None = None) -> list[int]:
    """Order ``cpus`` such that neighbors share as much as possible: a core, then a package.

    From Documentation/admin-guide/cputopology.rst of Linux.
    """
    topology = topology or TOPOLOGY
    return sorted(cpus, key=lambda cpu: (_number(cpu, "physical_package_id", topology), _first(cpu, topology), cpu))


def _number(cpu: int, name: str, topology: Path) -> int:
    try:
        return int((topology / f"cpu{cpu}/topology/{name}").read_text())
    except (OSError, ValueError):
        return 0


def _first(cpu: int, topology: Path) -> int:
    """Return the lowest number among the CPUs of a core. ``core_id`` is unique only within a package."""
    try:
        text = (topology / f"cpu{cpu}/topology/thread_siblings_list").read_text()
        return int(text.replace("-", ",").split(",")[0])
    except (OSError, ValueError):
        return cpu
