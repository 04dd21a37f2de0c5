"""Checks the limits of this node's processes, its name service, and whether its CPUs are there and free."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import pwd
import resource
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit.base import fsio, procfs
from toolkit.plugins.site.checks import Finding, Severity, ok

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
    """Check the limit on locked memory of a node with InfiniBand.

    With GPUs NCCL does not start without it; ranks without GPUs do not use it.
    """
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
#: Seconds between two of the three looks at the processes. Only demand that lasts through both intervals counts: a
#: daemon that wakes up is busy in one of them. The kernel counts in nanoseconds, so this interval is enough.
LOOK_S = 0.12
#: CPUs that others may take from the ranks before a warning, and before the node is refused: these shares of the CPUs
#: that the ranks need, but never less than these numbers.
WARNING_SHARE, WARNING_CPUS = 0.25, 0.5
BAD_SHARE, BAD_CPUS = 0.5, 0.9


def check_cpus(asked: int, usable: float | None = None) -> Finding:
    """Compare the CPUs that this process may use with those that the ranks need.

    Affinity and the cgroup's quota limit them.
    """
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


# ------------------------------------------------------------------------------------------------ who else uses them


@dataclass(frozen=True)
class Process:
    """One process at one moment.

    ``demand_s`` counts its threads' time on a CPU and their time waiting for one: a starved process needs as much as
    one that is not. ``seen_s`` is the moment on a monotonic clock: on a busy node we may be made to wait in the middle
    of a look.
    """

    pid: int
    parent: int
    name: str
    demand_s: float
    seen_s: float


@dataclass(frozen=True)
class Use:
    """CPUs that processes ask for: of no job, by process; and of other jobs together."""

    strangers: Mapping[Process, float]
    other_jobs: float


def check_taken(asked: int, use: Use | None = None, online: int | None = None) -> Finding:
    """Check whether other processes take the CPUs that the ranks need.

    Only demand that finds no room on the CPUs that we do not ask for counts. Other jobs are the scheduler's business:
    they are worth a warning where a site does not confine them. Processes outside of any job have escaped from a job
    that is over, or belong to a user who logged in.
    """
    use = measure_use() if use is None else use
    online = online or os.cpu_count() or 1
    strangers = sum(use.strangers.values())
    # Demand that fits on the CPUs which the ranks do not need takes nothing from them.
    taken = strangers + use.other_jobs - max(0, online - asked)
    # Only the part that processes of no job take counts against the node.
    severity = _severity(min(taken, strangers), asked)
    if severity != "ok":
        text = (
            f"processes of no job ask for {strangers:.1f} of its {online} CPUs, of which the ranks need {asked} "
            f"({_names(use.strangers)}): end them, or have the node drained"
        )
        return Finding("cpus taken", severity, f"{strangers:.1f}", text)
    # What other jobs take is at most a warning: the scheduler has placed them here.
    if _severity(taken, asked) == "bad":
        text = (
            f"other jobs ask for {use.other_jobs:.1f} of its {online} CPUs, of which the ranks need {asked}: the site "
            "does not confine jobs to their CPUs; ask for whole nodes (cluster.exclusive=true)"
        )
        return Finding("cpus taken", "warning", f"{use.other_jobs:.1f}", text)
    return ok("cpus taken", f"{max(0.0, taken):.1f}")


def _severity(cpus: float, asked: int) -> Severity:
    if cpus >= max(BAD_CPUS, BAD_SHARE * asked):
        return "bad"
    return "warning" if cpus >= max(WARNING_CPUS, WARNING_SHARE * asked) else "ok"


def _names(users: Mapping[Process, float]) -> str:
    lines: list[str] = []
    for process in sorted(users, key=lambda process: -users[process])[:3]:
        if users[process] >= 0.1:
            lines.append(f"{process.name}, pid {process.pid} of {_owner(process.pid)}: {users[process]:.1f}")
    return ", ".join(lines)


def _owner(pid: int) -> str:
    try:
        uid = (PROC / str(pid)).stat().st_uid
    except OSError:
        return "?"
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def measure_use(look_s: float = LOOK_S) -> Use:
    """Measure the CPUs that the visible processes, except our own, ask for just now."""
    looks = [processes()]
    for _ in range(2):
        time.sleep(look_s)
        looks.append(processes())
    return sort_out(steady_demand(looks), looks[-1], os.getpid(), os.environ.get("SLURM_JOB_ID"))


def steady_demand(looks: Sequence[Mapping[int, Process]]) -> dict[Process, float]:
    """Return the CPUs that each process of the last look asked for in every interval."""
    demand: dict[Process, float] = {}
    for pid, process in looks[-1].items():
        if not all(pid in look for look in looks):
            continue
        cpus: list[float] = []
        for sooner, later in itertools.pairwise(look[pid] for look in looks):
            cpus.append(max(0.0, later.demand_s - sooner.demand_s) / (later.seen_s - sooner.seen_s))
        demand[process] = min(cpus)
    return demand


def job_of(pid: int) -> str | None:
    """Return the job of a process by its environment.

    It can be read only for our own user's processes; those of other users belong to other jobs.
    """
    try:
        variables = (PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return None
    return next((v.decode().partition("=")[2] for v in variables if v.startswith(b"SLURM_JOB_ID=")), None)


def sort_out(
    demand: Mapping[Process, float],
    table: Mapping[int, Process],
    us: int,
    job: str | None,
    job_of: Callable[[int], str | None] = job_of,
) -> Use:
    """Divide the demand into that of strangers and that of other jobs.

    What descends from a slurmstepd belongs to a job, whichever user owns it. Without a slurmstepd above ourselves we
    are in no job, and every process outside our own family is a stranger.
    """
    in_job = _in_step(us, table)
    # Our ancestors and our descendants.
    family = set(_ancestors(us, table)) | {pid for pid in table if us in _ancestors(pid, table)}
    strangers, other_jobs = {}, 0.0
    for process, cpus in demand.items():
        if in_job and _in_step(process.pid, table):
            other_jobs += cpus if job_of(process.pid) != job else 0.0
        elif process.pid not in family:
            strangers[process] = cpus
    return Use(strangers, other_jobs)


def _in_step(pid: int, table: Mapping[int, Process]) -> bool:
    return any(table[ancestor].name.startswith("slurmstepd") for ancestor in _ancestors(pid, table))


def _ancestors(pid: int, table: Mapping[int, Process]) -> Iterator[int]:
    """Yield the process itself, then its ancestors. A parent outside of our pid namespace is 0."""
    while pid in table:
        yield pid
        pid = table[pid].parent


def processes(proc: Path = PROC) -> dict[int, Process]:
    """Return every process that we can see, by pid."""
    table: dict[int, Process] = {}
    for folder in proc.iterdir():
        if not folder.name.isdigit():
            continue
        pid, stat = int(folder.name), procfs.read(folder.name, proc)
        try:
            demand_s, seen_s = _scheduled_s(folder), time.monotonic()
        except OSError:  # it has just ended
            continue
        if stat is None:
            continue
        # Without schedstat only the time on a CPU is known.
        if demand_s is None:
            demand_s = stat.cpu_s
        table[pid] = Process(pid, stat.parent, stat.name, demand_s, seen_s)
    return table


def _scheduled_s(folder: Path) -> float | None:
    """Return the seconds on a CPU and in the queue for one, of all threads.

    Returns None if the kernel does not count them.
    """
    total_ns = 0
    for thread in (folder / "task").iterdir():
        try:
            run_ns, wait_ns, _ = (thread / "schedstat").read_text().split()
        except (FileNotFoundError, ProcessLookupError):
            if (thread / "stat").exists():
                return None
            continue  # the thread has just ended
        total_ns += int(run_ns) + int(wait_ns)
    return total_ns / 1e9


#: With NFS a node may see a new file this much later than the node that wrote it.
SEEN_WITHIN_S = 3.0
#: The file with the caller's token.
TOKEN = "token"
#: The figure of a shared folder that is the same here.
SAME = "same"
#: Free bytes and inodes below which a run cannot go on, and below which it cannot go on for long.
BAD_BYTES, WARNING_BYTES = 100 * 2**20, 2**30
BAD_INODES, WARNING_INODES = 100, 10_000


def check_shared(folder: Path, token: str, node: str, within_s: float = SEEN_WITHIN_S) -> Finding:
    """Check that the caller's token can be read in ``folder``, and leave an answer there.

    The caller reads the answer.
    """
    wrong = _reading(folder, token, within_s)
    if wrong is None:
        try:
            fd = os.open(folder / node, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                os.write(fd, token.encode())
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            wrong = f"{folder.parent}: cannot be written to ({_words(error)}){_advice(error)}"
    return ok("shared folder", SAME) if wrong is None else Finding("shared folder", "bad", "bad", wrong)


def read_soon(path: Path, wanted: str, within_s: float = SEEN_WITHIN_S) -> str | None:
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
        text = read_soon(folder / TOKEN, token, within_s)
    except OSError as error:
        return f"{folder.parent}: cannot be read ({_words(error)}){_advice(error)}"
    if text is None:
        # Tell a missing mount from a file that does not appear on a folder of the same name.
        with contextlib.suppress(OSError):
            if not folder.parent.is_dir():
                return f"{folder.parent} does not exist here: its file system is not mounted; have it mounted"
        return (
            f"{folder.parent} is another folder here than on the batch host, or a stale one: what was written there is "
            f"not seen within {within_s:g} s; have its file system mounted anew"
        )
    if text != token:
        return f"{folder / TOKEN} has other content here than on the batch host; have its file system mounted anew"
    return None


def _words(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else str(error)


def _advice(error: OSError) -> str:
    advice = {
        errno.ESTALE: ": the handle is stale; have its file system mounted anew",
        errno.EROFS: ": it is mounted read-only here; have it mounted for writing",
        errno.ENOSPC: ": it is full; make room, or set TOOLKIT_RUNS to another folder",
        errno.EDQUOT: ": your quota is used up; make room, or set TOOLKIT_RUNS to another folder",
    }
    return advice.get(error.errno or 0, "; have the node looked at, or set TOOLKIT_RUNS to another folder")


def check_space(check: str, path: Path) -> Finding:
    """Check the free space and inodes where ``path`` lies."""
    try:
        stat = os.statvfs(path)
    except OSError as error:
        return Finding(check, "bad", "?", f"{path}: {_words(error)}{_advice(error)}")
    free, inodes = stat.f_bavail * stat.f_frsize, stat.f_favail
    counted = stat.f_files > 0  # a file system such as btrfs makes inodes on demand
    figure = fsio.size_text(free)
    there = f"{path} has {figure} and {inodes if counted else 'enough'} inodes free"
    if free < BAD_BYTES or (counted and inodes < BAD_INODES):
        return Finding(check, "bad", figure, f"{there}: it is full; make room, or choose another folder")
    if free < WARNING_BYTES or (counted and inodes < WARNING_INODES):
        return Finding(check, "warning", figure, f"{there}: it is nearly full; make room")
    return ok(check, figure)
