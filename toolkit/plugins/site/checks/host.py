"""Checks the limits of this node's processes, its name service, its CPUs, and its disks."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import resource
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from toolkit.base import fsio
from toolkit.base.process_limits import limits
from toolkit.plugins.site.checks import Finding, ok

#: TCPStore looks up its peers' addresses, and each rank waits for that.
LOOK_UP_WARNING_S = 1.0
#: A rank keeps open its files, its sockets to its peers and its pipes to its data loaders' workers.
BAD_FILES, WARNING_FILES = 256, 1024
#: InfiniBand locks the memory that it sends from and receives into.
LOCKED_BYTES = 64 * 2**20


def check_look_up(address: str, look_up: Callable[[str], object] = socket.gethostbyaddr) -> Finding:
    """Measure how long the name service takes for our own address. That it knows no name is harmless."""
    began = time.monotonic()
    with contextlib.suppress(OSError):
        look_up(address)
    took_s = time.monotonic() - began
    if took_s < LOOK_UP_WARNING_S:
        return ok("look-up", f"{took_s:.2f} s")
    return slow_look_up(f"took {took_s:.1f} s", f"{took_s:.1f} s")


def slow_look_up(how_long: str, figure: str) -> Finding:
    """Return a warning, not an error: ranks start late, but they start."""
    text = (
        f"the reverse look-up of the node's own address {how_long}, and every rank waits for it when it opens the "
        "process group: add the nodes to /etc/hosts, or have the name server in /etc/resolv.conf looked at"
    )
    return Finding("look-up", "warning", figure, text)


def check_open_files(limit: int | None = None) -> Finding:
    """Check the soft limit on open files, which is what the ranks have."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    figure = "unlimited" if limit == resource.RLIM_INFINITY else str(limit)
    if limit == resource.RLIM_INFINITY or limit >= WARNING_FILES:
        return ok("open files", figure)
    text = f"a process may open {limit} files only: raise `ulimit -n` to {WARNING_FILES} or more (cluster.setup)"
    return Finding("open files", "bad" if limit < BAD_FILES else "warning", figure, text)


def check_locked_memory(gpus: int, limit: int | None = None) -> Finding:
    """Check the limit on locked memory with InfiniBand. Without it NCCL does not start; CPU ranks do not use it."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit is None else limit
    figure = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit // 1024} KiB"
    if limit == resource.RLIM_INFINITY or limit >= LOCKED_BYTES:
        return ok("memlock", figure)
    text = (
        f"a process may lock {figure} of memory only, and InfiniBand needs much more: have slurmd's LimitMEMLOCK set "
        "to infinity, and do not lower `ulimit -l` in your profile"
    )
    return Finding("memlock", "bad" if gpus else "warning", figure, text)


PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


def check_cpus(asked: int, usable: float | None = None) -> Finding:
    """Compare the CPUs that this process may use, by affinity and cgroup, with those that the ranks need."""
    usable = usable_cpus() if usable is None else usable
    figure = f"{usable:g} of {asked}"
    if usable >= asked:
        return ok("cpus", f"{usable:g}")
    text = (
        f"only {usable:g} of the {asked} CPUs that the ranks need are usable, by affinity or cgroup: ask for fewer "
        "(cluster.cpus_per_task), or have the node's slurmd looked at"
    )
    return Finding("cpus", "bad", figure, text)


def usable_cpus() -> float:
    """Return the number of CPUs by affinity, limited by the cgroup's quota."""
    try:
        groups = (PROC / "self/cgroup").read_text()
    except OSError:
        groups = ""
    return min([float(len(os.sched_getaffinity(0))), *cpu_quotas(groups)])


def cpu_quotas(groups: str, root: Path = CGROUPS) -> Iterator[float]:
    """Yield the CPUs that each cgroup above us allows. ``groups`` is the text of ``/proc/self/cgroup``."""
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        # cgroup 2 names no controllers; of cgroup 1 only the hierarchy with "cpu" counts.
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / "cpu" if controllers else root
        folder = top / path.lstrip("/")
        # A parent's quota also binds, so go up to the root.
        while folder != top.parent:
            # cgroup 2 writes ``max 100000`` or ``150000 100000`` in one file; cgroup 1 has two files, -1 for no limit.
            for names in (["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]):
                try:
                    words = " ".join((folder / name).read_text() for name in names).split()
                except OSError:
                    continue
                if words[0] not in ("max", "-1"):
                    yield int(words[0]) / int(words[1])
            folder = folder.parent


#: The file with the caller's token.
TOKEN = "token"
#: The figure of a shared folder that is the same here.
SAME = "same"
#: Free bytes and inodes below which a run cannot continue, and below which it cannot for long.
BAD_BYTES, WARNING_BYTES = 100 * 2**20, 2**30
BAD_INODES, WARNING_INODES = 100, 10_000


def check_shared(folder: Path, token: str, node: str) -> Finding:
    """Check that the caller's token can be read in ``folder``, and leave an answer there for the caller."""
    wrong = _reading(folder, token, limits().file_seen_within_s)
    if wrong is None:
        try:
            fd = os.open(folder / node, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                os.write(fd, token.encode())
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            wrong = f"{folder.parent}: cannot be written to {_explained(error)}"
    return ok("shared folder", SAME) if wrong is None else Finding("shared folder", "bad", "bad", wrong)


def wait_for_text(path: Path, wanted: str, within_s: float) -> str | None:
    """Return the text of ``path`` when it is ``wanted``, at the latest after ``within_s``.

    Returns None if there is no such file. Raises OSError for all other errors.
    """
    deadline = time.monotonic() + within_s
    while True:
        try:
            text = path.read_text(errors="replace")
        except FileNotFoundError:
            text = None
        if text == wanted or time.monotonic() >= deadline:
            return text
        time.sleep(0.02)


def _reading(folder: Path, token: str, within_s: float) -> str | None:
    """Return what is wrong with the token in ``folder``, None if it can be read."""
    try:
        text = wait_for_text(folder / TOKEN, token, within_s)
    except OSError as error:
        return f"{folder.parent}: cannot be read {_explained(error)}"
    if text is None:
        # Tell a missing mount from a file that does not appear on a folder of the same name.
        with contextlib.suppress(OSError):
            if not folder.parent.is_dir():
                return f"{folder.parent} does not exist here: its file system is not mounted; have it mounted"
        return (
            f"{folder.parent} is another folder here than on the batch host, or a stale one: what was written there is "
            f"not seen within {within_s:g} s; have its file system remounted"
        )
    if text != token:
        return f"{folder / TOKEN} has other content here than on the batch host; have its file system remounted"
    return None


def _explained(error: OSError) -> str:
    """Return what an error means, in parentheses, and what to do."""
    known = {
        errno.ESTALE: ": the handle is stale; have its file system remounted",
        errno.EROFS: ": it is mounted read-only here; have it mounted for writing",
        errno.ENOSPC: ": it is full; make room, or set TOOLKIT_RUNS to another folder",
        errno.EDQUOT: ": your quota is used up; make room, or set TOOLKIT_RUNS to another folder",
    }
    advice = known.get(error.errno or 0, "; have the node looked at, or set TOOLKIT_RUNS to another folder")
    return f"({os.strerror(error.errno) if error.errno else error}){advice}"


def check_space(check: str, path: Path) -> Finding:
    """Check the free space and inodes where ``path`` lies."""
    try:
        stat = os.statvfs(path)
    except OSError as error:
        return Finding(check, "bad", "?", f"{path}: cannot be examined {_explained(error)}")
    free, inodes = stat.f_bavail * stat.f_frsize, stat.f_favail
    counted = stat.f_files > 0  # a file system such as btrfs makes inodes on demand
    figure = fsio.size_text(free)
    there = f"{path} has {figure} and {inodes if counted else 'enough'} inodes free"
    if free < BAD_BYTES or (counted and inodes < BAD_INODES):
        return Finding(check, "bad", figure, f"{there}: it is full; make room, or choose another folder")
    if free < WARNING_BYTES or (counted and inodes < WARNING_INODES):
        return Finding(check, "warning", figure, f"{there}: it is nearly full; make room")
    return ok(check, figure)


CORE, MEMORY = "core speed", "memory speed"
#: The checks whose figures `toolkit.plugins.site.checks.verdict` compares.
SPEEDS = (CORE, MEMORY)
#: Bytes that no cache holds, and the seconds in which each speed is measured as often as possible. The best one counts.
MEMORY_BYTES, FOR_S = 32 << 20, 0.06
HASHED_BYTES = 1 << 20


def check_speeds() -> list[Finding]:
    """Return the speed of hashing, which the core's clock decides, and of copying memory, both in bytes a second.

    The figures are compared with those of the job's other nodes. It takes an eighth of a second of one core and 64 MiB:
    short, because imports wait for it where a node has one core. It is for nodes on which no ranks work yet. It counts
    time on the processor, so other processes do not make the node seem slow.
    """
    block, source = bytes(HASHED_BYTES), bytearray(MEMORY_BYTES)
    target = (ctypes.c_char * MEMORY_BYTES)()
    origin = (ctypes.c_char * MEMORY_BYTES).from_buffer(source)
    core = HASHED_BYTES / best_s(lambda: hashlib.sha256(block))
    # A copy reads and writes each byte.
    memory = 2 * MEMORY_BYTES / best_s(lambda: ctypes.memmove(target, origin, MEMORY_BYTES))
    return [ok(CORE, f"{core / 1e6:.0f} MB/s", core), ok(MEMORY, f"{memory / 1e9:.1f} GB/s", memory)]


def best_s(work: Callable[[], object], for_s: float = FOR_S) -> float:
    """Return the shortest time on the processor that ``work`` takes, of all tries within ``for_s``."""
    end, best = time.monotonic() + for_s, float("inf")
    while time.monotonic() < end or best == float("inf"):
        began = time.thread_time()
        work()
        best = min(best, max(time.thread_time() - began, 1e-9))
    return best
