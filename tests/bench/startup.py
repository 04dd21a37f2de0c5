"""What supervision adds to the start of a job: the same script under plain srun and under us, in one allocation.

Two nodes of the box with one rank each. Seconds from the batch script's command to the script's first line, on the
slower rank, and to the end of its first all-reduce over gloo, of which most is the import of torch, the same for all.

    python -m tests.bench.startup [--rounds 5]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from tests.box import Box, BoxUnavailable

SCRIPT = """
import time; started = time.time()
import os, sys
for ours, slurms in (("RANK", "SLURM_PROCID"), ("WORLD_SIZE", "SLURM_NTASKS")):
    os.environ.setdefault(ours, os.environ[slurms])
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
with open(f"{sys.argv[1]}-{os.environ['RANK']}", "w") as file:
    file.write(f"{started} {time.time()}")
dist.destroy_process_group()
"""
WAYS = {
    "srun": "MASTER_ADDR=node1 MASTER_PORT=29511 srun {python} {script} {notes}",
    "ours, no preflight": "toolkit exec cluster.preflight=false -- {python} {script} {notes}",
    "ours": "toolkit exec -- {python} {script} {notes}",
}


def measure(box: Box, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """For each way and round, seconds to the first line and to the end of the first collective."""
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


def seconds(notes: Path) -> tuple[float, float]:
    """Of the slower rank."""
    began = float(notes.read_text())
    ranks = [Path(f"{notes}-{rank}").read_text().split() for rank in range(2)]
    first_line, end = (max(map(float, column)) for column in zip(*ranks, strict=True))
    return first_line - began, end - began


def main() -> None:
    """Run each way some times, in turn, and print the medians."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    try:
        with Box() as box:
            found = measure(box, args.rounds)
    except BoxUnavailable as reason:
        print(f"no Slurm to be had: {reason}")
        return
    print(f"{'seconds to':24}{'first line':>12}{'collective':>12}")
    for way, times in found.items():
        first_line, collective = (statistics.median(column) for column in zip(*times, strict=True))
        print(f"{way:24}{first_line:12.2f}{collective:12.2f}")


if __name__ == "__main__":
    main()
