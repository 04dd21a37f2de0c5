"""What the monitor of a node costs, beside a job of many processes.

python -m tests.bench.monitor [SECONDS]
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.bench import record
from toolkit.plugins.node_watch.node_monitor import MONITOR_COMMAND

#: Like eight ranks with eight data workers each, and a node's other processes.
RANKS, WORKERS = 8, 8
JOB = f"""
import os, time
held = bytearray(os.urandom(1 << 20)) * 64
for _ in range({RANKS}):
    if not os.fork():
        for _ in range({WORKERS}):
            if not os.fork():
                break
        time.sleep(100_000)
time.sleep(100_000)
"""


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Count the CPU time of a monitor for some seconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seconds", type=float, nargs="?", default=300.0)
    record.add_option(parser)
    args = parser.parse_args()
    seconds: float = args.seconds
    with (
        subprocess.Popen([sys.executable, "-I", "-S", "-c", JOB], start_new_session=True) as job,
        subprocess.Popen(MONITOR_COMMAND, stdout=subprocess.PIPE) as monitor,
    ):
        try:
            # The start of the monitor and of the job's processes does not count.
            time.sleep(2.0)
            began, used = time.monotonic(), cpu_s(monitor.pid)
            time.sleep(seconds)
            share = (cpu_s(monitor.pid) - used) / (time.monotonic() - began)
            status = Path(f"/proc/{monitor.pid}/status").read_text()
        finally:
            os.killpg(job.pid, 9)
            monitor.kill()
        samples = monitor.stdout.read().count(b'"usage"')
    peak = next(line.split(":")[1].strip() for line in status.splitlines() if line.startswith("VmHWM"))
    cost = f"{share:.3%} of a core over {seconds:.0f} s, {samples} samples, at most {peak}"
    job_of = f"monitor of {1 + RANKS * (1 + WORKERS)} processes"
    print(f"{job_of}: {cost}")
    rows = [
        record.row(f"{job_of}, of a core", [100 * share], "%"),
        record.row(f"{job_of}, at its peak", [int(peak.split()[0]) / 1024], "MiB"),
    ]
    record.write(args.json, rows)


if __name__ == "__main__":
    main()
