"""How much memory the toolkit's own processes take beside the ranks of a node, and how soon a node's GPUs are found.

Memory is the proportional set size (PSS): a page that n processes share counts as an n-th in each of them.

    python -m tests.bench.beside [--rounds N]
"""

from __future__ import annotations

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
from toolkit.base.node_programs import bare_python
from toolkit.files import rundir

CONFIG = ["configs/digits_ddp.yaml", "train.epochs=1000000"]
#: What a process is, by its command.
ROLES = {
    "supervisor": r"submitit\.core\._submit",
    "its guard": r"submitit\.local\._local",
    "agent": r"toolkit\.nodes\.agent\.node",
    "zygote": r"toolkit\.nodes\.agent\.zygote",
    "monitor": r"toolkit\.plugins\.monitor\.program",
    "store": r"toolkit\.ranks\.store_host",
    "rank": r"-m.toolkit.run",
}
FIND_GPUS = bare_python("toolkit.devices.on_node")


def pss_mib(run: rundir.RunDir) -> dict[str, list[float]]:
    """Return the PSS of each living process of a run, by its role."""
    found: dict[str, list[float]] = defaultdict(list)
    for role, size in _processes(run):
        found[role].append(size)
    return found


def _processes(run: rundir.RunDir) -> Iterator[tuple[str, float]]:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_text().replace("\0", " ")
            if str(run.path) not in command + (folder / "environ").read_text():
                continue
            size = re.search(r"^Pss:\s+(\d+)", (folder / "smaps_rollup").read_text(), re.MULTILINE)
        except OSError:
            continue
        role = next((role for role, words in ROLES.items() if re.search(words, command)), None)
        if role is not None and size is not None:
            yield role, int(size[1]) / 1024


def measure(folder: Path) -> Mapping[str, list[float]]:
    """Train two ranks for some seconds. Return the memory of each role."""
    environ = {**os.environ, "TOOLKIT_RUNS": str(folder)}
    toolkit = [sys.executable, "-m", "toolkit"]
    subprocess.run([*toolkit, "submit", *CONFIG, "--executor", "local"], env=environ, check=True)
    (run,) = rundir.all_runs(folder)
    try:
        wait_for(lambda: (run.status().progress.step or 0) > 1000, 120, "a training")
        time.sleep(5.0)  # the monitor's first samples
        return pss_mib(run)
    finally:
        subprocess.run([*toolkit, "cancel", run.id], env=environ, check=True)
        wait_for(lambda: not [*_processes(run)], 60, "the end of all processes")


def main() -> None:
    """Print a row for each role, and one for the search for GPUs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    record.add_option(parser)
    args = parser.parse_args()
    rounds = []
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            rounds.append(measure(Path(folder)))
    rows = [record.row(f"{role}, PSS", [max(each[role]) for each in rounds], "MiB") for role in ROLES]
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
