"""Samples what a job uses on one node: processors, memory, disk, network, GPUs.

Memory is what the job holds for itself: anonymous and shared pages, not the page cache. It is the kernel's count for
the job's control group where there is one, else that of its processes.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from toolkit.base import procfs
from toolkit.base.procfs import ProcessStat
from toolkit.devices.on_node import Gpus

#: A process that is younger may still become another program, with the job's variables.
YOUNG_S = 60.0
#: Processors are busy "at peak" over at least this long: an import for a moment needs no processor of its own.
PEAK_OVER_S = 5.0
#: To share out the pages of several processes exactly takes the longer, the more memory there is. It is done at each
#: eighth look and where processes have come or gone, and no more once it has taken longer than this.
EXACT_EVERY, EXACT_LOOK_S = 8, 0.05
#: Parts of a control group's memory that the kernel cannot take back: Linux, admin-guide/cgroup-v2.rst, memory.stat.
_HELD = ("anon", "shmem", "kernel_stack", "pagetables", "percpu", "sock", "slab_unreclaimable")
#: The same in version 1, where "total" is with all groups below: cgroup-v1/memory.rst.
_HELD_V1 = ("total_rss", "total_shmem")
#: The toolkit's own processes that import torch besides the ranks. They work at a start alone, so no request for a
#: processor follows from it.
_STARTERS = re.compile(r"-m[\0 ]toolkit\.(nodes\.agent\.zygote|ranks\.store_host)[\0 ]")


@dataclass(frozen=True)
class GpuUsage:
    """What a GPU has done since the first sample."""

    index: int
    busy: float = 0.0  #: a share, at the last sample
    busy_s: float = 0.0
    memory_bytes: int = 0
    most_memory_bytes: int = 0
    power_w: float = 0.0
    energy_j: float = 0.0
    idle_s: float = 0.0  #: since a sample last found it busy, or since the first one
    link: tuple[int, int] = (0, 0)  #: generation and lanes of PCIe, at best: an idle GPU slows its link down
    model: str = ""


@dataclass(frozen=True)
class NodeUsage:
    """What a job has used on a node since its agent began. Times in seconds since the epoch."""

    since: float
    until: float
    cpu_s: float = 0.0
    cpus: float = 0.0  #: busy over the last seconds
    most_cpus: float = 0.0  #: without what the toolkit has imported for a start
    memory_bytes: int = 0
    most_memory_bytes: int = 0
    shared_bytes: int = 0  #: of ``memory_bytes``; 0 where the control group does not tell
    read_bytes: int = 0
    written_bytes: int = 0
    received_bytes: int = 0  #: of the whole node
    sent_bytes: int = 0
    gpus: tuple[GpuUsage, ...] = ()


class _Totals(NamedTuple):
    cpu_s: float = 0.0
    start_up_s: float = 0.0  #: of it, by the toolkit's own imports
    memory_bytes: int = 0
    shared_bytes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0


class JobProcesses:
    """Finds the job's processes on this node: the agent, the tasks of srun, and what descends from them.

    A task is known by the job and the node in its environment. Other processes are looked at once, so the cost of a
    look depends on the number of the job's processes only.
    """

    def __init__(self, agent: int, environ: Mapping[str, str], proc: Path = Path("/proc")) -> None:
        self._agent, self._proc = agent, proc
        self._marks = [f"{name}={environ[name]}" for name in ("SLURM_JOB_ID", "SLURMD_NODENAME") if name in environ]
        self._roots: dict[int, int] = {}  #: the root of each process of the job
        self._others: set[int] = set()
        self._ended_s: dict[int, float] = {}  #: the CPU time of each root's processes, at the last look
        self._start_up_s: dict[int, float] = {}  #: that of each process that imports torch for others
        self._looks = 0
        self._exact_pids: set[int] = set()  #: the processes at the last exact look
        self._exact_look_s = 0.0  #: what that look has cost
        self._twice_bytes = 0  #: memory that the cheap count had then counted more than once

    def began(self, now: float) -> float:
        """Return when the agent began, in the time of ``now``."""
        agent = procfs.read(self._agent, self._proc)
        return now if agent is None else now - max(0.0, self._uptime_s() - agent.started_s)

    def totals(self) -> _Totals:
        """Return what all of them together use, and have used since they began."""
        processes = self._find()
        by_root = dict.fromkeys(self._ended_s, 0.0)
        memory = shared = read = written = 0
        for pid, process in processes.items():
            root = self._roots[pid]
            by_root[root] = by_root.get(root, 0.0) + process.family_cpu_s
            is_ours = process.parent == self._agent
            if pid in self._start_up_s or (is_ours and _STARTERS.search(self._text(f"{pid}/cmdline"))):
                self._start_up_s[pid] = process.family_cpu_s
            own_memory, own_shared = self._memory(pid)
            own_read, own_written = self._transfers(pid)
            memory += own_memory
            shared += own_shared
            read += own_read
            written += own_written
        # Find how much of ``memory`` was counted more than once: a fork has most pages in common with its parent.
        pids = {*processes}
        is_due = self._looks % EXACT_EVERY == 0 or pids != self._exact_pids
        self._looks += 1
        if is_due and self._exact_look_s <= EXACT_LOOK_S:
            began, exact = time.process_time(), 0
            for pid in pids:
                for size in re.findall(r"Pss_(?:Anon|Shmem):\s+(\d+)", self._text(f"{pid}/smaps_rollup")):
                    exact += int(size) << 10
            self._exact_pids, self._exact_look_s = pids, time.process_time() - began
            self._twice_bytes = memory - exact if exact else 0
        # What a root has used stays used when it has ended.
        self._ended_s = {root: max(cpu_s, self._ended_s.get(root, 0.0)) for root, cpu_s in by_root.items()}
        cpu_s, start_up_s = sum(self._ended_s.values()), sum(self._start_up_s.values())
        return _Totals(cpu_s, start_up_s, max(0, memory - self._twice_bytes), shared, read, written)

    def _find(self) -> dict[int, ProcessStat]:
        here = procfs.pids(self._proc)
        self._others &= here
        self._roots = {pid: root for pid, root in self._roots.items() if pid in here}
        stats = procfs.read_all(self._proc, here - self._others)
        uptime_s = self._uptime_s()
        for pid in stats:
            self._sort(pid, stats, uptime_s)
        return {pid: stat for pid, stat in stats.items() if pid in self._roots}

    def _sort(self, pid: int, stats: Mapping[int, ProcessStat], uptime_s: float) -> None:
        """Note the root that ``pid`` descends from, if it has one."""
        way: list[int] = []
        while pid in stats and pid not in self._roots and pid not in way:
            way.append(pid)
            if pid == self._agent or self._is_task(pid, stats):
                self._roots[pid] = pid
                break
            pid = stats[pid].parent
        root = self._roots.get(pid)
        for each in way:
            if root is not None:
                self._roots[each] = root
            elif uptime_s - stats[each].started_s > YOUNG_S:
                self._others.add(each)

    def _is_task(self, pid: int, stats: Mapping[int, ProcessStat]) -> bool:
        parent = procfs.read(stats[pid].parent, self._proc) if self._marks else None
        if parent is None or not parent.name.startswith("slurmstepd"):
            return False
        variables = self._text(f"{pid}/environ").split("\0")
        return all(mark in variables for mark in self._marks)

    def _memory(self, pid: int) -> tuple[int, int]:
        """Return the anonymous and shared bytes together, and the shared ones."""
        found = dict(re.findall(r"(RssAnon|RssShmem):\s+(\d+)", self._text(f"{pid}/status")))
        shared = int(found.get("RssShmem", 0)) << 10
        return (int(found.get("RssAnon", 0)) << 10) + shared, shared

    def _transfers(self, pid: int) -> tuple[int, int]:
        """Return the bytes read from and written to disks, those of ended children included."""
        found = dict(re.findall(r"(?m)^(read_bytes|write_bytes): (\d+)", self._text(f"{pid}/io")))
        return int(found.get("read_bytes", 0)), int(found.get("write_bytes", 0))

    def _uptime_s(self) -> float:
        return float(self._text("uptime").split()[0])

    def _text(self, name: str) -> str:
        """Return a file's content, empty if it cannot be read. The process has ended, or is another user's."""
        try:
            # A look reads hundreds of files: through Path each takes more than twice as long.
            with open(f"{self._proc}/{name}", "rb", buffering=0) as file:  # noqa: PTH123
                return file.read().decode(errors="replace")
        except OSError:
            return ""


def cgroup_memory(root: Path = Path("/")) -> tuple[int, int] | None:
    """Return the memory of the job's control group, above our step's, and its shared part; None if it has no group."""
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            parts = path.split("/")
            step = next((place for place, part in enumerate(parts) if part.startswith("step_")), None)
            if step is None or (controllers and "memory" not in controllers.split(",")):
                continue
            folder = root / "sys/fs/cgroup" / ("memory" if controllers else "")
            with contextlib.suppress(OSError):
                text = folder.joinpath(*parts[1:step], "memory.stat").read_text()
                known = {name: int(value) for name, _, value in (row.partition(" ") for row in text.splitlines())}
                held = [known.get(name, 0) for name in (_HELD_V1 if controllers else _HELD)]
                return sum(held), held[1]
    return None


def network_bytes(root: Path = Path("/")) -> tuple[int, int]:
    """Return the bytes that the node has received and sent, over all networks but loopback."""
    received = sent = 0
    with contextlib.suppress(OSError):
        for line in (root / "proc/net/dev").read_text().splitlines()[2:]:
            name, _, figures = line.partition(":")
            if name.strip() != "lo":
                counts = figures.split()
                received, sent = received + int(counts[0]), sent + int(counts[8])
    # InfiniBand counts in words of four bytes: Linux, ABI/stable/sysfs-class-infiniband.
    for file in (root / "sys/class/infiniband").glob("*/ports/*/counters/port_*_data"):
        with contextlib.suppress(OSError, ValueError):
            count = 4 * int(file.read_text())
            received += count if file.name == "port_rcv_data" else 0
            sent += count if file.name == "port_xmit_data" else 0
    return received, sent


class NodeSampler:
    """Makes the samples of one node, and sums them up."""

    def __init__(
        self,
        processes: JobProcesses,
        gpus: Gpus | None = None,
        clock: Callable[[], float] = time.time,
        root: Path = Path("/"),
    ) -> None:
        self._processes, self._gpus, self._clock, self._root = processes, gpus, clock, root
        self._network = network_bytes(root)
        self._first_energy = {gpu.index: gpus.utilization(gpu).energy_j for gpu in gpus.gpus} if gpus else {}
        since = processes.began(clock())
        self._usage = NodeUsage(since, clock(), gpus=tuple(GpuUsage(gpu.index) for gpu in gpus.gpus) if gpus else ())
        #: Time, CPU time and that of start-up at the beginning of what counts for the peak.
        self._peak_from = (since, 0.0, 0.0)

    def sample(self) -> NodeUsage:
        before, now, totals = self._usage, self._clock(), self._processes.totals()
        held = cgroup_memory(self._root) or (totals.memory_bytes, totals.shared_bytes)
        received, sent = network_bytes(self._root)
        cpu_s = max(before.cpu_s, totals.cpu_s)
        cpus, most_cpus = before.cpus, before.most_cpus
        # CPUs are a mean over PEAK_OVER_S or more. What the toolkit's start-up has used is no part of the peak.
        since, cpu_s_then, start_up_s_then = self._peak_from
        if now - since >= PEAK_OVER_S:
            cpus = (cpu_s - cpu_s_then) / (now - since)
            most_cpus = max(most_cpus, cpus - (totals.start_up_s - start_up_s_then) / (now - since))
            self._peak_from = (now, cpu_s, totals.start_up_s)
        # Totals over processes fall when a process ends: the most that was seen counts.
        self._usage = replace(
            before,
            until=now,
            cpu_s=cpu_s,
            cpus=cpus,
            most_cpus=most_cpus,
            memory_bytes=held[0],
            most_memory_bytes=max(before.most_memory_bytes, held[0]),
            shared_bytes=held[1],
            read_bytes=max(before.read_bytes, totals.read_bytes),
            written_bytes=max(before.written_bytes, totals.written_bytes),
            received_bytes=max(before.received_bytes, received - self._network[0]),
            sent_bytes=max(before.sent_bytes, sent - self._network[1]),
            gpus=tuple(self._of_gpus(max(0.0, now - before.until))),
        )
        return self._usage

    def _of_gpus(self, elapsed_s: float) -> Iterator[GpuUsage]:
        if self._gpus is None:
            return
        for gpu, known in zip(self._gpus.gpus, self._usage.gpus, strict=True):
            load = self._gpus.utilization(gpu)
            # Where a driver does not tell, the GPU counts as used: else the next job would be advised to do without.
            busy = 1.0 if load.busy is None else load.busy
            memory, power_w = load.memory_bytes or 0, load.power_w or 0.0
            # GPUs before Volta count no energy: take the power instead.
            first, energy_j = self._first_energy[gpu.index], known.energy_j + power_w * elapsed_s
            if first is not None and load.energy_j is not None:
                energy_j = load.energy_j - first
            yield GpuUsage(
                gpu.index,
                busy,
                known.busy_s + busy * elapsed_s,
                memory,
                max(known.most_memory_bytes, memory),
                power_w,
                energy_j,
                0.0 if busy else known.idle_s + elapsed_s,
                max(known.link, self._gpus.link(gpu)),
                gpu.model,
            )
