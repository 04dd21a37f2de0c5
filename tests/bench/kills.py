"""From the SIGKILL of a rank to the next step that all ranks finish.

    python -m tests.bench.kills [--kills 100] [--how job|script] [--strategy ddp|fsdp] [--what rank|node]

Faults hit one run on four nodes again and again. ``script`` is a user's own loop under `toolkit exec`, ``job`` a job of
the Trainer with its state in memory. A rank drawn at random is killed at a random moment of its training. With
``--what node`` a node is cut off from the network, and one of as many spares as ``--kills`` takes its place. The ranks
note each step that they have finished. *Made again* are steps that a rank had finished before.
"""

import argparse
import contextlib
import os
import random
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.bench import record, restart
from tests.box import Box, BoxUnavailable
from tests.waiting import wait_for

NODES, LIMIT_S = 4, 100
#: The digits job, slowed down such that most of a step is no computing, with the notes of restart.py. A rank that asks
#: for the batch of the next step has finished the one before.
JOB = """
import json, os, time
from jobs import classify
from toolkit.data.loader import Loader
plain_at = Loader.at
def main(config):
    last = [None]
    def at(self, step):
        last[0], before = step, last[0]
        if before is None or step != before + 1:  # the first, or the sample by which the model is built
            return plain_at(self, step)
        with open(f"{folder}/notes-{os.environ['RANK']}.jsonl", "a") as file:
            told = {"event": "step", "time": time.time(), "step": before}
            told |= {"pid": os.getpid(), "node": os.uname().nodename}
            file.write(json.dumps(told) + "\\n")
        time.sleep(0.02)
        return plain_at(self, step)
    Loader.at = at
    classify.Classify.main(config, classify.Params())
"""
CONFIG = """
name: kills
job: jobs.noting
cluster: {preflight: false, spare_nodes: SPARES}
strategy: {name: STRATEGY}
data: {name: digits, global_batch_size: 64}
model: {name: mlp}
train: {epochs: 1000000, log_every: 50}
checkpoint: {every_steps: 100, memory_every_steps: 1}
retry: {max_failures: 100000, no_progress_attempts: 1000}
"""
COMMANDS = {
    "script": "exec toolkit exec cluster.preflight=false retry.max_failures=100000 -- "
    "{python} {folder}/script.py {folder}",
    "job": "exec toolkit supervise {folder}/kills.yaml",
}


def prepare(folder: Path, how: str, strategy: str, spares: int) -> str:
    """Write what is run; return the batch script's last line."""
    (folder / "script.py").write_text(restart.SCRIPT)
    (folder / "jobs").mkdir()
    for name in ("__init__", "classify", "models"):
        source = Path(__file__).parents[2] / "jobs" / f"{name}.py"
        (folder / "jobs" / source.name).write_text(source.read_text())
    (folder / "jobs/noting.py").write_text(JOB.replace("{folder}", str(folder)))
    (folder / "kills.yaml").write_text(CONFIG.replace("STRATEGY", strategy).replace("SPARES", str(spares)))
    return COMMANDS[how].format(python=sys.executable, folder=folder)


def first_steps(folder: Path, since: float) -> list[Mapping[str, Any]]:
    """Return the first step after ``since`` of each rank that has made one."""
    found = [restart.notes(folder, rank, since)["step"] for rank in range(NODES)]
    return [steps[0] for steps in found if steps]


def one_blow(box: Box, folder: Path, dice: random.Random, what: str) -> tuple[float, int | None]:
    """Return the seconds to a step of every rank, and the number of repeated steps.

    The number is None where the notes name no step.
    """
    for rank in range(NODES):  # else each look reads the whole run's
        (folder / f"notes-{rank}.jsonl").write_text("")
    began = time.time()
    wait_for(lambda: len(first_steps(folder, began)) == NODES, LIMIT_S, "a step of each rank")
    time.sleep(dice.uniform(0.5, 2.0))
    rank = dice.randrange(int(what == "node"), NODES)  # without its batch host a job cannot continue
    victim = wait_for(lambda: process_of(box, folder, rank), LIMIT_S, f"the process of rank {rank}")
    node = restart.notes(folder, rank)["step"][-1]["node"]
    if what == "node":
        box.cut_node(node)
    else:
        os.kill(victim, signal.SIGKILL)
    killed = time.time()
    settled = killed + 0.2  # steps that the others were in the midst of
    steps = wait_for(lambda: _all(first_steps(folder, settled)), LIMIT_S, "a step of each rank after it")
    if what == "node":
        box.join_node(node)
    before = [note for each in range(NODES) for note in restart.notes(folder, each)["step"] if note["time"] < settled]
    again = (
        max(note["step"] for note in before) - min(note["step"] for note in steps) + 1 if "step" in steps[0] else None
    )
    return max(note["time"] for note in steps) - killed, again


def _all(steps: list[Mapping[str, Any]]) -> list[Mapping[str, Any]] | None:
    return steps if len(steps) == NODES else None


def process_of(box: Box, folder: Path, rank: int) -> int | None:
    """Return the pid of the process that made the rank's last step.

    None if it is not found at this moment.
    """
    last = restart.notes(folder, rank)["step"][-1]
    for pid, _ in box.processes(last["node"]):
        with contextlib.suppress(OSError, StopIteration):  # one that has just ended
            if restart.inner_pid(pid) == last["pid"]:
                return pid
    return None


def main() -> None:
    """Kill, and print the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--how", choices=sorted(COMMANDS), default="job")
    parser.add_argument("--strategy", choices=["ddp", "fsdp"], default="ddp", help="of a job")
    parser.add_argument("--what", choices=["rank", "node"], default="rank", help="what is lost; a node of a job only")
    record.add_option(parser)
    args = parser.parse_args()
    # Each cut of a node uses up one spare.
    dice, spares = random.Random(), args.kills if args.what == "node" else 0
    try:
        with Box(nodes=NODES + spares) as box:
            folder = box.shared / "kills"
            folder.mkdir()
            command = prepare(folder, args.how, args.strategy, spares)
            script = f"#!/bin/bash\ncd {folder}\nexport TOOLKIT_RUNS={folder}/runs\n{command}\n"
            (folder / "job.sh").write_text(script)
            size = ["--no-kill", f"--nodes={NODES + spares}", "--ntasks-per-node=1", f"--output={folder}/log"]
            box.run(["sbatch", *size, str(folder / "job.sh")])
            blows = [one_blow(box, folder, dice, args.what) for _ in range(args.kills)]
    except BoxUnavailable as reason:
        print(f"no Slurm to be had: {reason}")
        return
    took = sorted(seconds for seconds, _ in blows)
    p99 = took[min(len(took) - 1, round(0.99 * len(took)))]
    what = args.how if args.how == "script" else f"{args.how} with {args.strategy}"
    print(f"{what}, {len(took)} times a {args.what}: seconds to the next step of all {NODES} ranks: ", end="")
    print(f"median {statistics.median(took):.2f}, p99 {p99:.2f}, longest {took[-1]:.2f}")
    rows = [record.row(f"{what}, a {args.what} lost, to a step of all", took)]
    if args.how == "job":
        rows.append(record.row("repeated steps", [again or 0 for _, again in blows], "steps"))
    record.write(args.json, rows)
    if args.how == "job":
        counts = Counter(again for _, again in blows)
        print("repeated steps: " + ", ".join(f"{count} x {steps}" for steps, count in sorted(counts.items())))


if __name__ == "__main__":
    main()
