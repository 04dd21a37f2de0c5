"""The start of a job under us and under plain srun, in one allocation.

The same script runs on two nodes of the box with one rank each. Seconds are from the batch script's command, on the
slower rank: to the script's first line, to the end of its first all-reduce over gloo, and to the end of its first
training step by DDP. Most of that is imports: of torch, and of modules that torch itself imports in the first step.

Before that it counts the CPU seconds of the whole start and end of eight such ranks on this machine, beside those of
one rank alone.

    python -m tests.bench.startup [--rounds 5]
"""

import argparse
import contextlib
import ctypes
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.bench import record
from tests.box import Box, BoxUnavailable
from toolkit.nodes.agent.node import PR_SET_CHILD_SUBREAPER

SCRIPT = """
import time; started = time.time()
import os, sys
for ours, slurms in (("RANK", "SLURM_PROCID"), ("WORLD_SIZE", "SLURM_NTASKS")):
    os.environ.setdefault(ours, os.environ.get(slurms, ""))
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
collective = time.time()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(1, 8)).sum().backward()
optimizer.step()
with open(f"{sys.argv[1]}-{os.environ['RANK']}", "w") as file:
    file.write(f"{started} {collective} {time.time()}")
dist.destroy_process_group()
"""
WAYS = {
    "srun": "MASTER_ADDR=node1 MASTER_PORT=29511 srun {python} {script} {notes}",
    "ours, no preflight": "toolkit exec cluster.preflight=false -- {python} {script} {notes}",
    "ours": "toolkit exec -- {python} {script} {notes}",
}


def measure(box: Box, rounds: int) -> dict[str, list[tuple[float, ...]]]:
    """Return for each way and round the seconds to the first line, collective and step.

    Collective and step count to their ends.
    """
    folder = box.shared / "startup"
    folder.mkdir()
    (folder / "script.py").write_text(SCRIPT)
    lines = ["#!/bin/bash", f"export TOOLKIT_RUNS={folder}/runs"]
    for number in range(rounds):
        for index, command in enumerate(WAYS.values()):
            notes = folder / f"{index}-{number}"
            lines.append(f"date +%s.%N > {notes}")
            lines.append(command.format(python=sys.executable, script=folder / "script.py", notes=notes))
    (folder / "job.sh").write_text("\n".join(lines) + "\n")
    size = ["--nodes=2", "--ntasks-per-node=1", f"--output={folder}/log"]
    box.run(["sbatch", "--wait", *size, f"{folder}/job.sh"], timeout=600 * rounds)  # a busy machine is slow
    return {way: [seconds(folder / f"{index}-{number}") for number in range(rounds)] for index, way in enumerate(WAYS)}


def seconds(notes: Path) -> tuple[float, ...]:
    """Read those of the slower rank."""
    began = float(notes.read_text())
    ranks = [Path(f"{notes}-{rank}").read_text().split() for rank in range(2)]
    return tuple(max(map(float, column)) - began for column in zip(*ranks, strict=True))


LOCAL_RANKS = 8
#: What a rank may say when its process group is closed, in torch's own threads: then the round is repeated.
ABORTED, TRIES = "terminate called without an active exception", 8
ALONE = ("RANK=0", "WORLD_SIZE=1", "MASTER_ADDR=127.0.0.1", "MASTER_PORT=29512")


def cpu_s(command: Sequence[str], environ: Mapping[str, str]) -> float:
    """Return the user and system time of a command and all that it has started."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # what it leaves behind is ours to wait for
    for left in reversed(range(TRIES)):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True)
        if done.returncode == 0:
            break
        if not left or ABORTED not in done.stderr:
            raise RuntimeError(done.stderr)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure_cpu(rounds: int) -> dict[str, list[float]]:
    """For each way and round, CPU seconds of ``LOCAL_RANKS`` ranks."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        script.write_text(SCRIPT)
        python, notes, binaries = sys.executable, f"{folder}/notes", Path(sys.executable).parent
        ours = ["exec", "--executor=local", "--wait", f"cluster.tasks_per_node={LOCAL_RANKS}", "--"]
        ways = {
            "one rank alone": ["env", *ALONE, python, str(script), notes],
            "torchrun": [f"{binaries}/torchrun", f"--nproc-per-node={LOCAL_RANKS}", str(script), notes],
            "ours": [f"{binaries}/toolkit", *ours, python, str(script), notes],
        }
        environ = {"TOOLKIT_RUNS": f"{folder}/runs", "OMP_NUM_THREADS": "1"}
        cpu_s(ways["one rank alone"], environ)  # its files are in memory from now on
        return {way: [cpu_s(command, environ) for _ in range(rounds)] for way, command in ways.items()}


def main() -> None:
    """Run each way some times, in turn, and print the medians."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    record.add_option(parser)
    args = parser.parse_args()
    rows = []
    print(f"CPU seconds of {LOCAL_RANKS} ranks on this machine")
    of_cpu = measure_cpu(args.rounds)
    for way, seconds_of in of_cpu.items():
        to, peer = of_cpu["one rank alone"], "one rank alone"
        rows.append(record.row(f"CPU of {LOCAL_RANKS} ranks, {way}", seconds_of, to=to, peer=peer))
        print(f"{way:24}{statistics.median(seconds_of):12.2f}")
    # The first part needs no Slurm, and is recorded where there is none.
    try:
        with Box() as box:
            found = measure(box, args.rounds)
    except BoxUnavailable as reason:
        print(f"no Slurm to be had: {reason}")
        record.write(args.json, rows)
        return
    print(f"{'seconds to':24}{'first line':>12}{'collective':>12}{'step':>12}")
    steps = {way: [each[2] for each in times] for way, times in found.items()}
    for way, times in found.items():
        print(f"{way:24}" + "".join(f"{statistics.median(column):12.2f}" for column in zip(*times, strict=True)))
        rows.append(record.row(f"start to a step on 2 nodes, {way}", steps[way], to=steps["srun"], peer="srun"))
    record.write(args.json, rows)


if __name__ == "__main__":
    main()
