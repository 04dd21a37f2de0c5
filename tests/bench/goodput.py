"""Goodput of a job of which a rank is killed every minute.

The job has two nodes and a spare in the box, and lasts twenty minutes by default. A step takes 100 ms, most of it a
sleep in place of a GPU's work. A checkpoint is saved every 50 steps, so every 5 s. The nodes keep the state in memory
as well: `--memory` is the value of `checkpoint.memory_every_steps`.

Goodput is (steps that count x undisturbed time of a step) / wall time, from the first observed step to the end. The
steps that count are the progress of the run: a step that was repeated after a failure counts once. The undisturbed time
of a step, saves included, is measured in the same run before the first failure. The bench reads status.json, which is
up to a second late. Imports are the time from a process's start to the end of its job module's imports (torch and
everything of ours), in the slowest rank of each new attempt. They include the interpreter's own start, but not the CUDA
context of a real job.

    python -m tests.bench.goodput [--minutes 20] [--every 60] [--memory auto|null|1]

torchft publishes 82 % at one failure a minute.
"""

import argparse
import os
import random
import re
import signal
import statistics
import time
from pathlib import Path
from typing import Any

from tests.bench import record
from tests.box import Box
from tests.slurm.site import END_S, Site
from tests.waiting import wait_for
from toolkit.files.rundir import RunDir

CONFIG = """
job: jobs.goodput
cluster: {nodes: 2, spare_nodes: 1, tasks_per_node: 1, time_min: 1440}
retry: {max_failures: 100000}
data: {name: digits, global_batch_size: 64}
optim: {lr: 0.05}
train: {epochs: 1000000, eval_every: 10000000, log_every: 50}
checkpoint: {every_steps: 50, memory_every_steps: MEMORY}
"""
JOB = """
import os, time
from pathlib import Path
from typing import Any
from jobs import classify
from toolkit.data.loader import Loader

started_s = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
print(f"imported after {time.clock_gettime(time.CLOCK_BOOTTIME) - started_s:.2f} s", flush=True)
plain_at = Loader.at

def at(self, step):
    time.sleep(0.1)
    return plain_at(self, step)

def main(config):
    Loader.at = at
    classify.Classify.main(config, classify.Params())
"""


def start(site: Site, memory: str) -> RunDir:
    """The running job, at its first step."""
    source = Path(__file__).parents[2] / "jobs"
    jobs = {name: (source / f"{name}.py").read_text() for name in ("classify", "models")}
    project = site.project(**jobs, goodput=JOB)
    (project / "goodput.yaml").write_text(CONFIG.replace("MEMORY", memory))
    site.run("toolkit", "submit", "goodput.yaml", cwd=project)
    run = site.only_run()

    def has_begun() -> bool:
        assert run.result() is None, run.result()
        return run.step() > 0

    wait_for(has_begun, END_S, "the first step")
    return run


def kill_a_rank(site: Site, run: RunDir) -> float:
    """Seconds until the next attempt has made a step."""
    status, killed = run.status(), time.monotonic()
    os.kill(site.ranks(random.choice(status.nodes))[0], signal.SIGKILL)

    def trains() -> bool:
        now = run.status()
        assert run.result() is None, run.result()
        progress = now.progress
        return (now.attempt or 0) > (status.attempt or 0) and (progress.step or 0) > (progress.step_start or 0)

    wait_for(trains, END_S, "a step after the kill")
    return time.monotonic() - killed


def imports_s(run: RunDir, attempt: int) -> float:
    """Of the attempt's slowest rank."""
    logs = [path.read_text() for path in run.attempt_logs(attempt).glob("rank-*.log")]
    return max(float(taken) for log in logs for taken in re.findall(r"imported after ([\d.]+) s", log))


def measure(site: Site, minutes: float, every_s: float, memory: str) -> list[dict[str, Any]]:
    """Kill ranks for so long, print the figures, and return the rows."""
    run = start(site, memory)
    began, first, recoveries = time.monotonic(), run.step(), list[float]()
    undisturbed_s = 0.0
    while (due := began + every_s * (len(recoveries) + 1)) < began + 60 * minutes:
        time.sleep(max(0.0, due - time.monotonic()))
        undisturbed_s = undisturbed_s or (time.monotonic() - began) / (run.step() - first)
        recoveries.append(kill_a_rank(site, run))
        print(f"failure {len(recoveries)}: a new step after {recoveries[-1]:.1f} s, at step {run.step()}", flush=True)
    time.sleep(max(0.0, began + 60 * minutes - time.monotonic()))
    wall_s, steps = time.monotonic() - began, run.step() - first
    attempts = run.attempts()
    starts = [a.step_start for a in attempts[1:]] + [run.status().progress.step_start]
    # Reports come up to a second late: the next attempt may begin after the last step that was reported.
    again = sum(max(0, a.step_end - start) for a, start in zip(attempts, starts, strict=True))
    imported_s = statistics.mean(imports_s(run, a.attempt + 1) for a in attempts)
    back_s = statistics.mean(recoveries)
    print(f"{len(recoveries)} failures in {wall_s:.0f} s, undisturbed {undisturbed_s * 1000:.0f} ms a step")
    goodput = steps * undisturbed_s / wall_s
    print(f"goodput {goodput:.1%}: {steps} steps that count, {again} made again")
    print(f"kill to first step {back_s:.1f} s (mean), of which imports {imported_s:.1f} s ({imported_s / back_s:.0%})")
    return [
        record.row("goodput", [100 * goodput], "%", better="more"),
        record.row(f"kills in {wall_s / 60:.0f} minutes", [len(recoveries)], ""),
        record.row("repeated steps after each", [again / len(recoveries)], "", better="less"),
        record.row("kill to a step, seen in status.json", recoveries),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--every", type=float, default=60.0, help="seconds between two failures")
    parser.add_argument("--memory", default="auto", help="checkpoint.memory_every_steps")
    record.add_option(parser)
    options = parser.parse_args()
    with Box() as box:
        folder = box.shared / "goodput"
        folder.mkdir()
        rows = measure(Site(box, folder), options.minutes, options.every, options.memory)
    record.write(options.json, rows)


if __name__ == "__main__":
    main()
