"""File systems: whether all nodes share one, and how much a node's own can take."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from toolkit import fsio

#: Types of file systems that many nodes read from, as /proc/mounts names them.
SHARED = {
    *("nfs", "nfs4", "lustre", "gpfs", "beegfs", "beegfs_nodev", "ceph", "panfs", "pvfs2", "orangefs", "wekafs"),
    *("cifs", "smb3", "afs", "9p", "virtiofs", "glusterfs", "daos", "quobyte", "vast"),
}
#: Those whose files are in the node's memory.
IN_MEMORY = {"tmpfs", "ramfs"}
#: The part of the available memory that copies may take.
MEMORY_SHARE = 0.5
#: The part of a disk that copies leave free for others.
LEFT_FREE = 0.05


def file_system(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """Return the type of the file system of ``path``; an empty text if it is unknown."""
    real, found = path.resolve(), (0, "")
    for line in mounts.read_text(errors="replace").splitlines():
        _, folder, kind, *_ = line.split(" ")
        folder = folder.replace("\\040", " ")
        # Of equal folders the last mount is the one that is seen.
        if real.is_relative_to(folder) and len(folder) >= found[0]:
            found = (len(folder), kind)
    return found[1]


def is_shared(path: Path) -> bool:
    """True if other nodes read from the same file system."""
    return file_system(path).removeprefix("fuse.") in SHARED


def room_bytes(folder: Path) -> int:
    """Return how many bytes copies may take in ``folder``."""
    status = os.statvfs(folder)
    room = int(status.f_bavail * status.f_frsize - LEFT_FREE * status.f_blocks * status.f_frsize)
    if file_system(folder) in IN_MEMORY:
        room = min(room, int(MEMORY_SHARE * available_memory()))
    return room


def available_memory(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes of memory that this process may still take, of the machine and of its control groups."""
    lines = (proc / "meminfo").read_text().splitlines()
    left = [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    with contextlib.suppress(OSError):
        for line in (proc / "self/cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)  # "0::/a/b" in version 2, "9:memory:/a/b" in version 1
            if not kinds:
                left += _left_in_groups(groups / path[1:], "memory.max", "memory.current")
            elif "memory" in kinds.split(","):
                left += _left_in_groups(groups / "memory" / path[1:], "memory.limit_in_bytes", "memory.usage_in_bytes")
    return max(0, min(left, default=0))


def _left_in_groups(group: Path, limit: str, usage: str) -> Iterator[int]:
    """Yield what the limit of a control group leaves, and that of each group above: their limits count, too."""
    for folder in (group, *group.parents):
        with contextlib.suppress(OSError, ValueError):  # there is no limit
            yield int((folder / limit).read_text()) - int((folder / usage).read_text())


def own_folders(stage_dir: str | None, environ: Mapping[str, str]) -> list[Path]:
    """Return the folders of this node that may hold copies, the best first. Memory comes last."""
    if stage_dir is not None:
        return [fsio.expand(stage_dir)]
    named = [environ.get("SLURM_TMPDIR"), environ.get("TMPDIR"), "/tmp", "/dev/shm"]
    folders = dict.fromkeys(Path(name) for name in named if name)
    return [folder for folder in folders if folder.is_dir() and not is_shared(folder)]
