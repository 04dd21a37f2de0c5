"""From the SIGKILL of a rank to the next step: ours, torchrun and requeue.

The same script runs in each way, on two nodes of the box with one rank each: a small DDP training on gloo that saves
every 20 steps. A rank gets SIGKILL. The script itself notes the start of its processes, the end of the import of torch,
and each step. `own` is the time from the kill to the first line of the restarted rank, `imports` from there to the end
of the import, `to a step` from the kill to the end of the first step. Imports are the same for all three. The requeue
is the means of a plain batch script: it notices the end of srun and calls ``scontrol requeue`` (the box lets a requeued
job start after 6 s; Slurm's default is 121).

    python -m tests.bench.restart [--rounds 3]
"""

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.bench import record
from tests.box import Box, BoxUnavailable
from tests.waiting import PATIENCE, wait_for

SCRIPT = """
import time; started = time.time()
import json, os, sys
folder, step = sys.argv[1], 0
def note(event, at=None):
    with open(f"{folder}/notes-{os.environ['RANK']}.jsonl", "a") as file:
        file.write(json.dumps({"event": event, "time": at or time.time(), "pid": os.getpid(),
                               "node": os.uname().nodename, "step": step}) + "\\n")
note("start", started)
import torch, torch.distributed as dist
from torch import nn
note("imported")
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
saved = sys.argv[-1] + "/saved.pt"
if os.path.exists(saved):
    state = torch.load(saved)
    step = state["step"]
    model.load_state_dict(state["model"])
while not os.path.exists(folder + "/stop"):
    optimizer.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    time.sleep(0.02)
    step += 1
    note("step")
    if step % 20 == 0 and dist.get_rank() == 0:
        torch.save({"step": step, "model": model.state_dict()}, saved + ".new")
        os.replace(saved + ".new", saved)
"""
OURS = "exec toolkit exec cluster.preflight=false -- {python} {script} {folder}"
TORCHRUN = (
    "srun --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=0 {python} -m torch.distributed.run --nnodes=2 "
    "--nproc-per-node=1 --max-restarts=3 --rdzv-backend=c10d --rdzv-endpoint=node1:29511 {script} {folder}"
)
REQUEUE = (
    "export MASTER_ADDR=node1 MASTER_PORT=29511 WORLD_SIZE=2\n"
    "srun --kill-on-bad-exit=1 bash -c 'RANK=$SLURM_PROCID exec {python} {script} {folder}' || "
    "scontrol requeue $SLURM_JOB_ID\nsleep 60"
)
#: Until 50 steps are done: on a busy machine that takes several times as long.
LIMIT_S = 1200
#: After the kill. torchrun's own restart hangs now and then.
HANG_S = 30 * PATIENCE
WAYS: Mapping[str, str] = {"ours": OURS, "torchrun --max-restarts": TORCHRUN, "scontrol requeue": REQUEUE}


def notes(folder: Path, rank: int, since: float = 0.0) -> dict[str, list[dict[str, Any]]]:
    """Return the rank's notes after ``since``, by event.

    An incomplete last line is left out.
    """
    found: dict[str, list[dict[str, Any]]] = {"start": [], "imported": [], "step": []}
    path = folder / f"notes-{rank}.jsonl"
    for line in path.read_text().splitlines()[: path.read_text().count("\n")] if path.exists() else []:
        note = json.loads(line)
        if note["time"] > since:
            found[note["event"]].append(note)
    return found


def one_round(box: Box, folder: Path, way: str) -> tuple[float, float, float] | None:
    """Return the seconds to the first line, of imports, and to the first step.

    The first and the last are counted from the kill. None if the restart hung.
    """
    folder.mkdir()
    (folder / "script.py").write_text(SCRIPT)
    command = WAYS[way].format(python=sys.executable, script=folder / "script.py", folder=folder)
    (folder / "job.sh").write_text(f"#!/bin/bash\ncd {folder}\nexport TOOLKIT_RUNS={folder}/runs\n{command}\n")
    size = ["--nodes=2", "--ntasks-per-node=1", "--requeue", f"--output={folder}/log", "--open-mode=append"]
    job = box.run(["sbatch", "--parsable", *size, str(folder / "job.sh")]).stdout.strip()
    wait_for(lambda: len(notes(folder, 1)["step"]) > 50, LIMIT_S, "50 steps")
    # The script notes its pid in the node's namespace; the signal needs the host's.
    inside = notes(folder, 1)["step"][-1]["pid"]
    victim = next(pid for pid, command in box.processes("node2") if inner_pid(pid) == inside)
    os.kill(victim, signal.SIGKILL)
    killed = time.time()
    while not (is_back := bool(notes(folder, 1, killed + 0.2)["step"])) and time.time() < killed + HANG_S:
        time.sleep(0.05)
    after = notes(folder, 1, killed + 0.05)
    (folder / "stop").touch()
    box.run(["scancel", job])
    box.wait_idle(90)
    if not is_back:
        return None
    start, imported = after["start"][0]["time"], after["imported"][0]["time"]
    return start - killed, imported - start, after["step"][0]["time"] - killed


def inner_pid(pid: int) -> int:
    """The pid that the process has in its node's own namespace."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("NSpid:")).split()[-1])


def report(one_round: Callable[[str, int], tuple[float, float, float] | None], rounds: int) -> list[dict[str, Any]]:
    """Print a line for each way: medians, and the ratio to ours. Return the rows.

    Raises RuntimeError if a way has hung more often than it has come back.
    """
    totals: dict[str, list[float]] = {}
    hung: Counter[str] = Counter()
    print(f"{'':24}{'own':>8}{'imports':>9}{'to a step':>11}{'ratio':>8}{'hung':>6}")
    ours = 0.0
    for way in WAYS:
        times: list[tuple[float, float, float]] = []
        while len(times) < rounds:
            seconds = one_round(way, len(times) + hung[way])
            # A round that hung is repeated, so that the medians are of ``rounds`` restarts.
            if seconds is not None:
                times.append(seconds)
                continue
            hung[way] += 1
            if hung[way] > rounds:
                raise RuntimeError(f"{way} has hung in {hung[way]} of {hung[way] + len(times)} rounds")
        totals[way] = [each[2] for each in times]
        own, imports, total = (statistics.median(column) for column in zip(*times, strict=True))
        ours = ours or total
        print(f"{way:24}{own:8.2f}{imports:9.2f}{total:11.2f}{total / ours:8.2f}{hung[way]:6}", flush=True)
    peer = "torchrun --max-restarts"
    rows = [record.row(f"kill to a step, {way}", totals[way], to=totals[peer], peer=peer) for way in WAYS]
    return rows + [record.row(f"rounds that hung, {way}", [hung[way]], "rounds") for way in WAYS]


def main() -> None:
    """Run each way some times and print the medians."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    record.add_option(parser)
    args = parser.parse_args()
    try:
        with Box() as box:
            rows = report(lambda way, n: one_round(box, box.shared / f"{way.split()[0]}-{n}", way), args.rounds)
            record.write(args.json, rows)
    except BoxUnavailable as reason:
        print(f"no Slurm to be had: {reason}")


if __name__ == "__main__":
    main()
