"""Tells how much memory this process may take. The node and the process's control groups limit it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def total_bytes(proc: Path = _PROC, groups: Path = _GROUPS) -> int:
    """Return the node's memory, or the least limit of this process's control groups."""
    limits = (limit for limit, _ in _limited(proc, groups))
    return min([_of_node("MemTotal", proc), *limits])


def available_bytes(proc: Path = _PROC, groups: Path = _GROUPS) -> int:
    """Return the bytes that this process can still take.

    They are left of the node's memory, or of the control group with the least left.
    """
    left = (limit - used for limit, used in _limited(proc, groups))
    return max(0, min([_of_node("MemAvailable", proc), *left]))


def _of_node(name: str, proc: Path) -> int:
    lines = (proc / "meminfo").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def oom_kills(proc: Path = _PROC, groups: Path = _GROUPS) -> int:
    """Return how many processes of this one's control groups were killed for lack of memory. 0 if unknown."""
    kills = 0
    for group, is_first_version in _own_groups(proc, groups):
        with contextlib.suppress(OSError, ValueError):
            lines = (group / ("memory.oom_control" if is_first_version else "memory.events")).read_text().splitlines()
            kills += int(dict(line.split() for line in lines).get("oom_kill", 0))
    return kills


def _limited(proc: Path, groups: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and use of each control group that limits this process. Limits of groups above count, too.

    The page cache is no use: the kernel gives it up for a process that needs the memory.
    """
    for group, is_first_version in _own_groups(proc, groups):
        limit, use, prefix = "memory.max", "memory.current", ""
        if is_first_version:
            limit, use, prefix = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
        for folder in (group, *group.parents):
            with contextlib.suppress(OSError, ValueError):  # there is no limit
                yield int((folder / limit).read_text()), int((folder / use).read_text()) - _cached(folder, prefix)


def _cached(group: Path, prefix: str) -> int:
    """Return the bytes of files on disks that the kernel caches. 0 if unknown.

    Files in shared memory are not among them: the kernel has those in its lists of anonymous memory.
    """
    with contextlib.suppress(OSError, ValueError):
        sizes = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return sum(int(sizes.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active"))
    return 0


def _own_groups(proc: Path, groups: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the folder of each memory group of this process. True marks cgroup version 1."""
    with contextlib.suppress(OSError, ValueError):  # a container hides it
        for line in (proc / "self/cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)  # "0::/a/b" in version 2, "9:memory:/a/b" in version 1
            if not kinds or "memory" in kinds.split(","):
                root = groups / "memory" if kinds else groups
                # A container may see a group as the root, and have the path from the node's root.
                yield root / path.removeprefix(_mounted(proc, root)).lstrip("/"), bool(kinds)


def _mounted(proc: Path, root: Path) -> str:
    """Return the group that is mounted at ``root``; ``/`` if that is unknown."""
    with contextlib.suppress(OSError):
        for line in (proc / "self/mountinfo").read_text().splitlines():
            _, _, _, group, place, *_ = line.split(" ")
            if place == str(root):
                return group
    return "/"
