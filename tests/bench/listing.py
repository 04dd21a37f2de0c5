"""`toolkit status --all` of 10,000 runs.

The runs are real record files, as supervisors write them: nine in ten have ended, others run or wait, one is damaged.
The page cache has the files. For comparison a loop reads each result.json, and the calls to the controller are compared
with those of a `squeue` watcher.

    python -m tests.bench.listing [--runs 10000]
"""

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.bench import record
from toolkit.files import rundir
from toolkit.plugins.testing.fake_slurm import FakeSlurm
from toolkit.slurm.shared_queue import WATCH_S, SharedQueue

NAMES = ("gpt-small", "gpt-large", "digits-ddp", "resnet50", "sweep-lr")
CONFIG = """name: {name}
job: jobs.classify
cluster: {{nodes: 2, tasks_per_node: 4, time_min: 240}}
optim: {{name: sgd, lr: {lr}}}
train: {{epochs: 10, seed: {seed}}}
"""


def make_runs(root: Path, count: int, seed: int = 0) -> None:
    """Write ``count`` run folders. The files are written plainly: flushes would take longer than all else."""
    dice, now = random.Random(seed), time.time()
    for number in range(count):
        state = dice.choices(("completed", "failed", "stopped", "running", "requeued"), (70, 15, 5, 5, 5))[0]
        begun = now - (count - number) * 600.0 * (0.5 + dice.random()) - 600
        name = NAMES[number % len(NAMES)]
        run_id = f"{rundir.id_time(begun)}-{number:08x}"
        _write_run(root / name / run_id, state, begun, now, dice)
    (root / NAMES[0] / "20260101-000000-deadbeef").mkdir(parents=True, exist_ok=True)
    (root / NAMES[0] / "20260101-000000-deadbeef/config.yaml").write_bytes(b"\0" * 64)
    (root / NAMES[0] / "20260101-000000-deadbeef/status.json").write_bytes(b'{"version": 1, "state": ')


def _write_run(path: Path, state: str, begun: float, now: float, dice: random.Random) -> None:
    for folder in ("logs/attempt-001", "submitit", "tensorboard", "checkpoints", "owners"):
        (path / folder).mkdir(parents=True)
    over, job = state not in ("running", "requeued"), str(dice.randrange(10**6, 10**7))
    steps, step = 1000, 1000 if state == "completed" else dice.randrange(1, 1000)
    updated, hosts = (begun + 500 if over else now + 3600), ["node1", "node2"]
    metrics = {"train/loss": dice.random(), "eval/loss": dice.random(), "eval/accuracy": dice.random()}
    parts = ("training", "data_wait", "checkpoint", "evaluation")
    # The records have the keys and sizes of real ones; their values need not agree with each other.
    goodput = {part: round(100 * dice.random(), 3) for part in ("queue", "start_up", *parts, "replay", "idle")}
    goodput["ratio"] = 0.5
    why = "rank 3 on node2: RuntimeError: CUDA out of memory; given up" if state == "failed" else None
    common = {"attempt": 1, "job_id": job, "restart_count": 0, "world_size": 8}
    start = {"since": begun, "submitted": begun, "queue_s": 3.4, "ready": begun + 4, "best_step": 0}
    progress = {
        "step": step,
        "step_start": 0,
        "total_steps": steps,
        "epoch": 1,
        "epochs": 10,
        "samples": 64 * step,
        "loss": metrics["train/loss"],
        "samples_per_s": 1132.9,
        "data_wait_fraction": 0.003,
        "save_s": 0.07,
        "eta_s": 60.0,
        "phase": "train",
        "spent": {part: goodput[part] for part in parts},
        "stragglers": [],
        "metrics": metrics,
        "time": begun + 400,
    }
    status = {"version": 1, "state": state, "run": f"{path.parent.name}/{path.name}", "host": "node1", "pid": 4711}
    status |= {**common, "nodes": hosts, "tasks": [4, 4], "started": begun + 4, "start": start, "updated": updated}
    status |= {"bad_nodes": {}, "degraded_nodes": {}, "stop": None, "progress": progress}
    status |= {"submitted": begun, "goodput": goodput, "why": why, "ended": begun + 500 if over else None}
    owner = {"version": 1, "number": 3, "token": f"{dice.getrandbits(64):016x}", "executor": "slurm", "host": "node1"}
    owner |= {"pid": 4711, "time": begun + 4, "jobs": [job], "follow_ups": []}
    sent = {"version": 1, "executor": "slurm", "job_id": job, "follow_ups": [], "host": "login", "time": begun}
    sent |= {"token": owner["token"]}
    at = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(begun + 4))
    line = {"version": 1, **common, "nodes": "node[1-2]", "started": at, "ended": at, "cause": "crashed"}
    line |= {"decision": "give_up", "step_start": 0, "step_end": step, "line": why, "goodput": goodput}
    result = {"version": 1, "state": state, "attempts": 1, "step": step, "epoch": 1, "samples": 64 * step}
    result |= {"metrics": metrics, "wall_s": 496.0, "goodput": goodput, "why": why}
    seed, lr = dice.randrange(100), dice.choice(("0.1", "0.01", "0.001"))
    (path / "config.yaml").write_text(CONFIG.format(name=path.parent.name, lr=lr, seed=seed))
    _json(path / "status.json", status)
    _json(path / "owner.json", owner)
    _json(path / "submitit/submission.json", sent)
    (path / "logs/supervisor.log").write_text(f"job {job} starts\n")
    (path / "tensorboard/metrics.jsonl").write_text(json.dumps({"step": step, "wall_time": begun, **metrics}) + "\n")
    if over:
        (path / "attempts.jsonl").write_text(json.dumps(line) + "\n")
        _json(path / "result.json", result)


def _json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=10_000)
    record.add_option(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        make_runs(root / "runs", args.runs)
        print(f"{args.runs} runs, `toolkit status --all`, seconds from the shell to the prompt:")
        environ = os.environ | {"TOOLKIT_RUNS": str(root / "runs"), "XDG_CACHE_HOME": str(root / "cache")}
        (root / "cache").mkdir()
        status = [sys.executable, "-m", "toolkit", "status", "--all"]
        rows, plain = list[dict[str, Any]](), _results_s(root / "runs")
        for clock, values in zip(("wall", "CPU"), _seconds(status, environ, 3), strict=True):
            print(f"  {clock}: {statistics.median(values):.2f} s")
            peer = "json.loads of each result.json in a loop"
            rows.append(record.row(f"{args.runs:,} runs: {clock}", values, to=[plain], peer=peer))
    print(f"  only result.json of each, by json.loads in a loop: {plain:.2f} s")
    calls = _calls_of_watch()
    print(
        "Calls to the controller in an hour of watching 100 runs in 10 terminals:\n"
        f"  toolkit watch: {calls} (counted in the fake Slurm, while half of them wait)\n"
        f"  watch -n 2 squeue --me, in each: {10 * 3600 // 2}\n"
        f"  a job.wait() loop of submitit, whose watcher of a process asks sacct every 2 to 60 s: {10 * 60} or more"
    )
    rows.append(record.row("calls in an hour of 10 terminals that watch 100 runs", [calls], "", better="less"))
    record.write(args.json, rows)


def _seconds(argv: list[str], environ: dict[str, str], times: int) -> tuple[list[float], list[float]]:
    """Return wall and CPU seconds of each call of a command."""
    wall, cpu = list[float](), list[float]()
    for _ in range(times):
        begun, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(argv, env=environ, stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        wall.append(time.perf_counter() - begun)
        cpu.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return wall, cpu


def _results_s(root: Path) -> float:
    """Return the seconds in which a loop reads the state of each run's ``result.json``."""
    begun, states = time.perf_counter(), Counter[str]()
    for path in root.glob("*/*/result.json"):
        states[json.loads(path.read_text())["state"]] += 1
    return time.perf_counter() - begun


def _calls_of_watch() -> int:
    slurm = FakeSlurm()
    jobs = [slurm.sbatch(["job.sh"]) for _ in range(100)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "queue.json"
        queues = [SharedQueue(slurm, path, lambda: slurm.now, slurm.advance) for _ in range(10)]
        for _ in range(360):
            for queue in queues:
                queue.show_jobs(jobs, every_s=WATCH_S)
            slurm.advance(10)
    return len(slurm.asked_for_jobs)


if __name__ == "__main__":
    main()
