"""Tells how much memory this process may take: of the node's, and of what its control groups allow."""

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
    """Return what is left of the node's memory, or of the control group with the least left."""
    left = (limit - used for limit, used in _limited(proc, groups))
    return max(0, min([_of_node("MemAvailable", proc), *left]))


def _of_node(name: str, proc: Path) -> int:
    lines = (proc / "meminfo").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def _limited(proc: Path, groups: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and use of each control group that limits this process. Limits of groups above count, too."""
    with contextlib.suppress(OSError, ValueError):  # a container hides it
        for line in (proc / "self/cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)  # "0::/a/b" in version 2, "9:memory:/a/b" in version 1
            root, limit, use = groups, "memory.max", "memory.current"
            if kinds:
                root, limit, use = groups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            if kinds and "memory" not in kinds.split(","):
                continue
            group = root / path.lstrip("/")
            for folder in (group, *group.parents):
                with contextlib.suppress(OSError, ValueError):  # there is no limit
                    yield int((folder / limit).read_text()), int((folder / use).read_text())
