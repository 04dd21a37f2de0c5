"""Which CPUs each task of a node gets: whole cores first, next to each other."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

TOPOLOGY = Path("/sys/devices/system/cpu")


def for_tasks(tasks: int, cpus_per_task: int | None) -> list[list[int] | None]:
    """Return the CPUs of each of ``tasks``, ``cpus_per_task`` of those that this process may use; None: all of them.

    None, too, where there are fewer than the tasks would take.
    """
    ours = os.sched_getaffinity(0)
    if cpus_per_task is None or tasks * cpus_per_task > len(ours):
        return [None] * tasks
    ordered = by_core(ours)
    return [sorted(ordered[task * cpus_per_task : (task + 1) * cpus_per_task]) for task in range(tasks)]


def by_core(cpus: Iterable[int], topology: Path | None = None) -> list[int]:
    """Order ``cpus`` such that neighbours share as much as possible: a core, then a package.

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
    """The lowest number among the CPUs of a core: ``core_id`` is one of its package's own."""
    try:
        text = (topology / f"cpu{cpu}/topology/thread_siblings_list").read_text()
        return int(text.replace("-", ",").split(",")[0])
    except (OSError, ValueError):
        return cpu
