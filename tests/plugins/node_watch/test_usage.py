"""The resources that a job uses on a node.

Compared with processes that know their own use, and read from made-up folders.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.plugins.node_watch.conftest import FakeDriver
from toolkit.plugins.node_watch import monitor_program
from toolkit.plugins.node_watch.node_monitor import MONITOR_COMMAND
from toolkit.plugins.node_watch.nvml import Nvml
from toolkit.plugins.node_watch.usage import GpuUsage, JobProcesses, NodeSampler, cgroup_memory, network_bytes

HELD = 96 << 20
#: Uses a second of processor time, half of it in a child that ends, and holds memory of its own beside a file that only
#: the page cache holds, and says what it has used, by its own clock.
WORKER = f"""
import os, pathlib, resource, sys, time
def burn(until):
    while time.process_time() < until:
        pass
held = bytearray(os.urandom(1 << 20)) * {HELD >> 20}
path = pathlib.Path(sys.argv[1])
path.write_bytes(bytes({HELD}))
path.read_bytes()
child = os.fork()
if not child:
    burn(0.5)
    os._exit(0)
os.waitpid(child, 0)
burn(0.5)
used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
print(sum(each.ru_utime + each.ru_stime for each in used), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[tuple[int, float]]:
    """Yield a process's id, and the processor time that it and its child have used."""
    command = [sys.executable, "-I", "-S", "-c", WORKER, str(tmp_path / "cached")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process.pid, float(process.stdout.readline())


def test_processor_time_and_own_memory_are_those_that_the_processes_know(worker: tuple[int, float]) -> None:
    pid, cpu_s = worker
    totals = JobProcesses(pid, {}).totals()
    assert totals.cpu_s == pytest.approx(cpu_s, abs=0.05)  # the kernel counts in hundredths of a second
    assert HELD <= totals.memory_bytes < HELD + (24 << 20), "the page cache holds as much again"


def test_pages_that_forks_share_are_counted_once() -> None:
    code = f"""
import os, sys
held = bytearray(os.urandom(1 << 20)) * {HELD >> 20}
for _ in range(3):
    child = os.fork()
    if not child:
        os.read(0, 1)
        os._exit(0)
print("ready", flush=True)
os.read(0, 1)
"""
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        # four processes share the pages; a plain sum would count HELD four times
        processes = JobProcesses(process.pid, {})
        sizes = [processes.totals().memory_bytes for _ in range(3)]
        process.kill()
    assert all(HELD <= size < HELD + (32 << 20) for size in sizes), sizes


class Proc:
    """A made-up /proc whose processes have run for a day."""

    def __init__(self, root: Path) -> None:
        self.folder = root
        root.mkdir(exist_ok=True)
        (root / "uptime").write_text("90000.00 0.00\n")

    def add(self, pid: int, name: str, parent: int, ticks: int, *variables: str, kib: int = 0, title: str = "") -> None:
        folder = self.folder / str(pid)
        folder.mkdir(exist_ok=True)
        fields = ["S", str(parent), *["0"] * 9, str(ticks), "0", "0", "0", *["0"] * 4, "100"]
        (folder / "stat").write_text(f"{pid} ({name}) {' '.join(fields)}\n")
        (folder / "environ").write_text("\0".join(variables))
        (folder / "cmdline").write_text(title)
        (folder / "status").write_text(f"RssAnon:\t{kib} kB\nRssFile:\t999 kB\nRssShmem:\t1 kB\n")

    def end(self, pid: int) -> None:
        for file in (self.folder / str(pid)).iterdir():
            file.unlink()
        (self.folder / str(pid)).rmdir()


def test_tasks_of_the_jobs_own_steps_count_and_other_processes_do_not(tmp_path: Path) -> None:
    proc, ours, mark = Proc(tmp_path), {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1"}, "SLURMD_NODENAME=n1"
    tick = os.sysconf("SC_CLK_TCK")
    proc.add(1, "init", 0, 5000)
    proc.add(10, "slurmstepd", 1, 0)
    proc.add(11, "agent (x)", 10, tick, "SLURM_JOB_ID=7", mark, kib=1024)
    proc.add(12, "rank", 11, 2 * tick, kib=2048)
    proc.add(20, "slurmstepd", 1, 0)
    proc.add(21, "mpi rank", 20, 4 * tick, "SLURM_JOB_ID=7", mark)
    proc.add(22, "of another job", 20, 8 * tick, "SLURM_JOB_ID=77", mark)
    proc.add(23, "of another node", 20, 16 * tick, "SLURM_JOB_ID=7", "SLURMD_NODENAME=n11")
    processes = JobProcesses(11, ours, tmp_path)
    totals = processes.totals()
    assert totals.cpu_s == 7
    assert (totals.memory_bytes, totals.shared_bytes) == ((1024 + 2048 + 3) << 10, 3 << 10)
    proc.end(21)  # what a task has used stays used
    assert processes.totals().cpu_s == 7


CGROUP_2 = "0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0\n"
CGROUP_1 = "9:cpuset:/slurm/uid_0/job_7/step_0\n4:memory:/slurm/uid_0/job_7/step_0\n0::/\n"


@pytest.mark.parametrize(
    ("groups", "folder", "stat"),
    [
        (CGROUP_2, "system.slice/slurmstepd.scope/job_7", "anon 100\nfile 9000\nshmem 20\npagetables 3\n"),
        (CGROUP_1, "memory/slurm/uid_0/job_7", "rss 1\ntotal_rss 103\ntotal_cache 9000\ntotal_shmem 20\n"),
    ],
    ids=["version 2", "version 1"],
)
def test_the_control_group_of_the_job_tells_its_memory(tmp_path: Path, groups: str, folder: str, stat: str) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups)
    assert cgroup_memory(tmp_path) is None
    (tmp_path / "sys/fs/cgroup" / folder).mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup" / folder / "memory.stat").write_text(stat)
    assert cgroup_memory(tmp_path) == (123, 20)


def test_what_is_imported_for_a_start_is_no_peak(tmp_path: Path) -> None:
    proc, tick, now = Proc(tmp_path / "proc"), os.sysconf("SC_CLK_TCK"), 1000.0
    proc.add(11, "agent", 1, 0)
    sampler = NodeSampler(JobProcesses(11, {}, proc.folder), clock=lambda: now, root=tmp_path)
    sampler.sample()
    peaks = []
    # In ten seconds each rank works for 5 s, the zygote for 8 s. Later the zygote has ended.
    for seconds, of_zygote in ((10, 8), (20, 8), (30, None)):
        now = 1000.0 + seconds
        proc.add(12, "rank", 11, 5 * tick * seconds // 10, title="python -m job")
        if of_zygote:
            proc.add(13, "python", 11, of_zygote * tick, title="python -P -m toolkit.nodes.agent.zygote 10 ranks")
        else:
            proc.end(13)
            proc.add(11, "agent", 1, 8 * tick)
        usage = sampler.sample()
        peaks.append((round(usage.cpus, 2), round(usage.most_cpus, 2)))
    assert peaks == [(1.3, 0.5), (0.5, 0.5), (0.5, 0.5)]


def test_the_networks_of_the_node_are_added_up_but_for_its_own_loop(tmp_path: Path) -> None:
    assert network_bytes(tmp_path) == (0, 0)
    (tmp_path / "proc/net").mkdir(parents=True)
    zeros = " 0 0 0 0 0 0 0 "
    lines = [f"    lo: 9{zeros}9{zeros}", f"  eth0: 100{zeros}10{zeros}"]
    (tmp_path / "proc/net/dev").write_text("\n".join(["head", "head", *lines]))
    counters = tmp_path / "sys/class/infiniband/mlx5_0/ports/1/counters"
    counters.mkdir(parents=True)
    (counters / "port_rcv_data").write_text("5\n")
    (counters / "port_xmit_data").write_text("7\n")
    assert network_bytes(tmp_path) == (120, 38)


def test_gpus_are_summed_up_from_sample_to_sample(tmp_path: Path, driver: FakeDriver) -> None:
    now = 1000.0
    driver.tell(
        {"busy": (0, 0), "memory": (1 << 20, 1 << 20), "milliwatts": (70_000, 60_000), "millijoules": (5000, 7)}
    )
    sampler = NodeSampler(JobProcesses(os.getpid(), {}), Nvml(None, driver.library), lambda: now, tmp_path)
    for busy, memory, millijoules in ((100, 3 << 30, 905_000), (50, 2 << 30, 1_805_000)):
        now += 10
        values = {"busy": (busy, 0), "memory": (memory, 1 << 20), "milliwatts": (90_000, 60_000)}
        # It slows its link down when it is idle.
        values |= {"generation": (5 if busy == 100 else 1, 0), "width": (16, 16)}
        driver.tell({**values, "millijoules": (millijoules, 7)})
        usage = sampler.sample()
    first, second = usage.gpus
    assert first == GpuUsage(0, 0.5, 15.0, 2 << 30, 3 << 30, 90.0, 1800.0, 0.0, (5, 16), "Fake 0")
    assert second == GpuUsage(1, 0.0, 0.0, 1 << 20, 1 << 20, 60.0, 0.0, 20.0, (0, 16), "Fake 1")


def test_a_gpu_that_counts_no_energy_is_reckoned_by_its_power(tmp_path: Path, driver: FakeDriver) -> None:
    now = 1000.0
    driver.tell({"milliwatts": (100_000, 0)})
    sampler = NodeSampler(JobProcesses(os.getpid(), {}), Nvml("0", driver.library), lambda: now, tmp_path)
    now += 20
    (gpu,) = sampler.sample().gpus
    assert (gpu.energy_j, gpu.idle_s) == (2000.0, 0.0), "a driver that does not tell leaves open whether it is idle"


def test_the_monitor_is_a_small_process_that_prints_samples() -> None:
    with subprocess.Popen(MONITOR_COMMAND, stdout=subprocess.PIPE, text=True) as process:
        usage = json.loads(process.stdout.readline())["usage"]
        status = Path(f"/proc/{process.pid}/status").read_text()
        process.kill()
    assert usage["memory_bytes"] > 0
    (peak_kib,) = (int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    most_mib = 20 if not Path("/dev/nvidiactl").exists() else 40  # 34 with the driver's library, on one GPU
    assert peak_kib < most_mib << 10


def test_samples_cost_less_than_a_thousandth_of_a_processor_in_the_long_run() -> None:
    for each_s in (0.001, 0.01, 0.05):
        elapsed_s = cost_s = 0.0
        number = 0
        while elapsed_s < 86_400:
            cost_s += each_s
            elapsed_s += monitor_program.wait_s(number, cost_s, elapsed_s)
            number += 1
        assert cost_s / elapsed_s <= 0.001
    assert number * 2 > 86_400 / monitor_program.RAREST_SAMPLE_S
    assert [monitor_program.wait_s(number, 0.0, 0.0) for number in range(6)] == [1, 2, 4, 8, 15, 15]
