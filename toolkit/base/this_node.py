"""This node, for processes of ours: its disks and memory, open files, and how a bare Python is started.

Disks: whether all nodes share one, which are a node's own, and where torch keeps there what it compiles. On NFS ranks
of many nodes would rename and delete each other's compiled files, and one dies of "Stale file handle".

Open files and sockets: most systems set a soft limit of 1,024 and a far higher hard limit, which a process may claim by
itself. The soft limit exists for programs that use ``select``, so it is raised only where many descriptors are needed.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from toolkit.base import fsio, torch_version, trust
from toolkit.base.errors import RequestError

_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def total_memory_bytes(proc: Path = _PROC, groups: Path = _GROUPS) -> int:
    """Return the node's memory, or the least limit of this process's control groups."""
    limits = (limit for limit, _ in _limited(proc, groups))
    return min([_of_node("MemTotal", proc), *limits])


def available_memory_bytes(proc: Path = _PROC, groups: Path = _GROUPS) -> int:
    """Return the bytes that are left of the node's memory, or of the control group with the least left."""
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

    Cached files of disks are not counted as used: the kernel drops them for a process that needs the memory. Files in
    shared memory are used: the kernel has those in its lists of anonymous memory.
    """
    for group, is_first_version in _own_groups(proc, groups):
        limit, use, prefix = "memory.max", "memory.current", ""
        if is_first_version:
            limit, use, prefix = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
        for folder in (group, *group.parents):
            with contextlib.suppress(OSError, ValueError):  # there is no limit
                most, used = int((folder / limit).read_text()), int((folder / use).read_text())
                with contextlib.suppress(OSError, ValueError):
                    sizes = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                    used -= sum(int(sizes.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active"))
                yield most, used


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


#: Types of file systems that many nodes read from, as /proc/mounts names them.
SHARED = {
    *("nfs", "nfs4", "lustre", "gpfs", "beegfs", "beegfs_nodev", "ceph", "panfs", "pvfs2", "orangefs", "wekafs"),
    *("cifs", "smb3", "afs", "9p", "virtiofs", "glusterfs", "daos", "quobyte", "vast"),
}


def file_system(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """Return the type of the file system of ``path``. Empty if it is unknown."""
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


def staging_folders(stage_dir: str | None, environ: Mapping[str, str]) -> list[Path]:
    """Return the folders of this node that may hold copies, the best first. Memory comes last."""
    if stage_dir is not None:
        return [fsio.expand(stage_dir)]
    named = [environ.get("SLURM_TMPDIR"), environ.get("TMPDIR"), "/tmp", "/dev/shm"]
    folders = dict.fromkeys(Path(name) for name in named if name)
    return [folder for folder in folders if folder.is_dir() and not is_shared(folder)]


def cache_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that move caches to a folder of this node, one for each user and version of torch.

    Left out are those that the user has set, and those of caches that are on a disk of the node already. The folder
    outlives the job, so that its next start finds what was compiled.
    """
    triton_home = environ.get("TRITON_HOME") or environ.get("HOME") or "~"
    # Not gettempdir(): it would remember its answer, and a script that sets TMPDIR later would not be heard.
    scratch = next((environ[name] for name in ("TMPDIR", "TEMP", "TMP") if environ.get(name)), "/tmp")
    places = {"TRITON_CACHE_DIR": fsio.expand(triton_home), "TORCHINDUCTOR_CACHE_DIR": Path(scratch)}
    moved = [name for name, place in places.items() if name not in environ and is_shared(place)]
    # A folder that no one else may write. /tmp comes first: Slurm removes its own folder with the job.
    for disk in sorted(staging_folders(None, environ) if moved else (), key=lambda disk: disk != Path("/tmp")):
        folder = disk / f"toolkit-caches-{os.getuid()}" / f"torch-{torch_version.installed() or 'none'}"
        with contextlib.suppress(OSError, RequestError):
            trust.refuse_untrusted(fsio.make_dir(folder, parents=1), "the folder of compiled kernels")
            return {name: str(folder / name.partition("_")[0].lower()) for name in moved}
    return {}


def max_open_files() -> int:
    """Return the number of descriptors that this process can claim."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return sys.maxsize if hard == resource.RLIM_INFINITY else hard


def raise_open_files() -> None:
    """Raise the soft limit of this process to the hard one."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextlib.contextmanager
def raised_open_files() -> Iterator[None]:
    """Raise the soft limit to the hard one inside the context. Programs that are started later get the old one."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    raise_open_files()
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def bare_python(module: str, *arguments: str) -> list[str]:
    """Return the command that calls ``main()`` of ``module``, which needs only Python's own library.

    ``-S``: searching site-packages takes longer than all checks of a node together.
    """
    here = str(Path(__file__).parents[2])
    code = f"import sys; sys.path.insert(0, {here!r}); from {module} import main; main()"
    return [sys.executable, "-I", "-S", "-c", code, *arguments]
