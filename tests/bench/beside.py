"""How much memory the toolkit's own processes take beside the ranks of a node, and how soon a node's GPUs are found.

Memory is the proportional set size (PSS): a page that n processes share counts as an n-th in each of them. Ranks are
forked from the zygote and share with it what it has imported, so the sum over a node is compared with that of as many
ranks under torchrun, which share nothing but files.

    python -m tests.bench.beside [--ranks N] [--rounds N]
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.bench import record
from tests.waiting import wait_for
from toolkit.base.this_node import bare_python
from toolkit.files import rundir

CONFIG = ["configs/digits_ddp.yaml", "train.epochs=1000000"]
#: What a process is, by its command.
ROLES = {
    "supervisor": r"submitit\.core\._submit",
    "its guard": r"submitit\.local\._local",
    "agent": r"toolkit\.nodes\.agent\.node",
    "zygote": r"toolkit\.nodes\.agent\.zygote",
    "monitor": r"toolkit\.plugins\.node_watch\.monitor_program",
    "store": r"toolkit\.ranks\.store_host",
    "rank": r"-m.toolkit.run",
}
#: The same model and a step as short, under torchrun.
PLAIN = """
import sys, time
from pathlib import Path
import torch
from torch import nn
torch.distributed.init_process_group("gloo")
net = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
model = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
while True:
    for _ in range(50):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.rand(8, 64)), torch.randint(10, (8,))).backward()
        optimizer.step()
    Path(sys.argv[1], str(torch.distributed.get_rank())).touch()
"""
FIND_GPUS = bare_python("toolkit.devices.on_node")


def pss_mib(run: rundir.RunDir) -> dict[str, list[float]]:
    """Return the PSS of each living process of a run, by its role."""
    found: dict[str, list[float]] = defaultdict(list)
    for command, size in _processes(str(run.path)):
        role = next((role for role, words in ROLES.items() if re.search(words, command)), None)
        if role is not None:
            found[role].append(size)
    return found


def _processes(word: str) -> Iterator[tuple[str, float]]:
    """Yield the command and the PSS of each process with ``word`` in its command or environment."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_text().replace("\0", " ")
            if word not in command + (folder / "environ").read_text():
                continue
            size = re.search(r"^Pss:\s+(\d+)", (folder / "smaps_rollup").read_text(), re.MULTILINE)
        except OSError:
            continue
        if size is not None:
            yield command, int(size[1]) / 1024


def measure(folder: Path, ranks: int) -> Mapping[str, list[float]]:
    """Train for some seconds. Return the memory of each role."""
    environ = {**os.environ, "TOOLKIT_RUNS": str(folder)}
    toolkit, size = [sys.executable, "-m", "toolkit"], f"cluster.tasks_per_node={ranks}"
    subprocess.run([*toolkit, "submit", *CONFIG, size, "--executor", "local"], env=environ, check=True)
    (run,) = rundir.all_runs(folder)
    try:
        wait_for(lambda: (run.status().progress.step or 0) > 200, 240, "a training")
        time.sleep(5.0)  # the monitor's first samples
        return pss_mib(run)
    finally:
        subprocess.run([*toolkit, "cancel", run.id], env=environ, check=True)
        wait_for(lambda: not [*_processes(str(run.path))], 60, "the end of all processes")


def measure_plain(folder: Path, ranks: int) -> float:
    """Return the memory of torchrun and its ranks, while they train."""
    (script := folder / "plain.py").write_text(PLAIN)
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", str(script), str(folder)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(torchrun, env=environ, stderr=subprocess.DEVNULL) as started:
        try:
            wait_for(lambda: all((folder / str(rank)).exists() for rank in range(ranks)), 240, "a training")
            return sum(size for _, size in _processes(str(folder)))
        finally:
            started.terminate()


def main() -> None:
    """Print a row for each role, and one for the search for GPUs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    record.add_option(parser)
    args = parser.parse_args()
    rounds, plain = [], []
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            rounds.append(measure(Path(folder), args.ranks))
        with tempfile.TemporaryDirectory() as folder:
            plain.append(measure_plain(Path(folder), args.ranks))
    rows = [record.row(f"{role}, PSS", [max(each[role]) for each in rounds], "MiB") for role in ROLES]
    own = [sum(sum(sizes) for role, sizes in each.items() if role != "rank") for each in rounds]
    whole = [sum(map(sum, each.values())) for each in rounds]
    rows.append(record.row(f"all beside {args.ranks} ranks, PSS", own, "MiB"))
    rows.append(record.row(f"{args.ranks} ranks under torchrun, PSS", plain, "MiB"))
    rows.append(record.row(f"{args.ranks} ranks and all beside, PSS", whole, "MiB", to=plain, peer="torchrun's"))
    searches = []
    for _ in range(10 * args.rounds):
        began = time.monotonic()
        subprocess.run(FIND_GPUS, check=True, stdout=subprocess.DEVNULL)
        searches.append(1000 * (time.monotonic() - began))
    rows.append(record.row("GPUs of a node found, a process of its own", searches, "ms"))
    for row in rows:
        print(f"{row['name']}: {row['median']:g} ({row['least']:g} to {row['most']:g}) {row['unit']}")
    record.write(args.json, rows)


if __name__ == "__main__":
    main()
