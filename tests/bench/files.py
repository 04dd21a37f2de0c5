"""What a run in steady training asks of the file server: operations on the runs folder that name a path, and flushes.

    python -m tests.bench.files [SECONDS | --ranks N ...]

One supervised run of two ranks on this machine, seen by strace once its first minute is over, and without saves. What
is done with an open file costs a network file system no metadata operation, and is not counted.

With ``--ranks`` a run of each size is seen from its submission to its end instead, split into phases. A line through
the sizes gives what a phase costs for each rank and, whatever their number, for the run; what is once for each node is
in the latter, for there is one node. The figures for 1,024 ranks are derived from that line, and were not measured.
"""

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.bench import record
from tests.waiting import wait_for
from toolkit.base.process_limits import limits
from toolkit.checkpoint.folder import committed
from toolkit.files.rundir import RunDir, all_runs

SAVES = 3
CONFIG = ("configs/digits_ddp.yaml", "train.epochs=1000000", "checkpoint.every_steps=100000000")


def processes(run: RunDir) -> list[int]:
    """Return the processes whose environment or command names the run."""
    found = list[int]()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            text = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
        except OSError:
            continue
        if run.id.encode() in text:
            found.append(int(folder.name))
    return found


def operations(run: RunDir, seconds: float, folder: Path) -> Counter[str]:
    """Count the operations of all the run's processes on its folder."""
    trace = folder / "trace"
    pids = [word for pid in processes(run) for word in ("-p", str(pid))]
    command = ["strace", "-f", "-qq", "-y", "-o", str(trace), "-e", "trace=%file,fsync,fdatasync,getdents64", *pids]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as strace:
        time.sleep(seconds)
        strace.terminate()
    counts = Counter[str]()
    for line in trace.read_text(errors="replace").splitlines():
        call = of_path(line, run.path)
        if call is not None:
            file = re.sub(r".*/", "", call.path)
            counts[f"{call.name} {re.sub(r'[.]tmp-.*', '', file).lstrip('.')}"] += 1
    return counts


class Call(NamedTuple):
    """A system call on a path."""

    process: str
    at: float  #: 0 without -ttt
    name: str
    path: str
    size: int  #: of a write


def of_path(line: str, folder: Path) -> Call | None:
    """Return the call in a line of a trace if it is on a path below ``folder``."""
    found = re.match(r"(\d+) +(?:([\d.]+) )?(\w+)\((.*)", line)
    if found is None or str(folder) not in line:
        return None
    process, at, name, rest = found.groups()
    if name == "newfstatat" and ', "",' in rest:  # of an open file
        return None
    named = re.findall(r'[<"]([^<">]+)[>"]', rest)
    path = named[0 if name == "write" else -1]
    size = re.search(r", (\d+)(?:\)| <unfinished)", rest) if name == "write" else None
    return Call(process, float(at or 0), name, path, int(size[1]) if size else 0) if str(folder) in path else None


def phases(ranks: int, folder: Path) -> dict[str, tuple[float, float]]:
    """Return the operations on paths and the bytes written of each phase of a run. That of a save is one save's."""
    runs, trace = folder / f"runs-{ranks}", folder / f"trace-{ranks}"
    environ = {**os.environ, "TOOLKIT_RUNS": str(runs), "OMP_NUM_THREADS": "1"}
    toolkit = [sys.executable, "-m", "toolkit"]
    size = [f"cluster.tasks_per_node={ranks}", "checkpoint.every_steps=200", "checkpoint.keep=100"]
    watched = "trace=%file,fsync,fdatasync,getdents64,write"
    strace = ["strace", "-f", "--seccomp-bpf", "-q", "-y", "-ttt", "-s", "4", "-o", str(trace), "-e", watched]
    submit = [*toolkit, "submit", CONFIG[0], CONFIG[1], *size, "--executor", "local"]
    with subprocess.Popen([*strace, *submit], env=environ, stderr=subprocess.DEVNULL) as process:
        wait_for(lambda: all_runs(runs), 300, "the run")
        (run,) = all_runs(runs)
        wait_for(lambda: run.status().progress.step, 600, "the first step")
        trained = time.time()
        wait_for(lambda: len(committed(run.checkpoints)) >= SAVES, 600, "some saves")
        stopped, saves = time.time(), len(committed(run.checkpoints))
        subprocess.run([*toolkit, "stop", run.id], env=environ, check=True)
        process.wait()
    lines = trace.read_text(errors="replace").splitlines()
    submitter = lines[0].split()[0]
    submitted = next(float(line.split()[1]) for line in lines if re.match(rf"{submitter} +[\d.]+ \+\+\+ exited", line))
    counts = {name: [0.0, 0.0] for name in ("submission", "start", "a save", "end")}
    for call in filter(None, (of_path(line, runs) for line in lines)):
        if trained <= call.at < stopped and "/checkpoints" not in call.path:
            continue  # the steady state
        phase = "submission" if call.at < submitted else "start" if call.at < trained else "end"
        phase = "a save" if trained <= call.at < stopped else phase
        counts[phase][call.name == "write"] += call.size if call.name == "write" else 1
    counts["a save"] = [value / saves for value in counts["a save"]]
    return {phase: (paths, written) for phase, (paths, written) in counts.items()}


def rows_of_phases(found: Mapping[int, Mapping[str, tuple[float, float]]]) -> list[dict[str, Any]]:
    """Return the rows: each size as measured, and the line through them."""
    rows = list[dict[str, Any]]()
    for phase in next(iter(found.values())):
        for index, (what, unit, scale) in enumerate((("operations on paths", "", 1), ("written", "KiB", 1024))):
            values = {ranks: each[phase][index] / scale for ranks, each in found.items()}
            rows += [record.row(f"{phase}, {ranks} ranks: {what}", [value], unit) for ranks, value in values.items()]
            if len(values) > 1:
                slope, base = statistics.linear_regression([*values], [*values.values()])
                rows.append(record.row(f"{phase}, each rank (a line through these): {what}", [slope], unit))
                rows.append(record.row(f"{phase}, 1,024 ranks (derived): {what}", [base + 1024 * slope], unit))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seconds", type=float, nargs="?", default=60.0)
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[], metavar="N", help="runs of N ranks by phases instead"
    )
    record.add_option(parser)
    args = parser.parse_args()
    if shutil.which("strace") is None:
        sys.exit("strace is not there: apt-get install strace")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.ranks:
            rows = rows_of_phases({ranks: phases(ranks, folder) for ranks in args.ranks})
        else:
            rows = steady(args.seconds, folder)
    for row in rows:
        print(f"{row['median']:10.2f} {row['unit']:3}  {row['name']}")
    record.write(args.json, rows)


def steady(seconds: float, folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a run in steady training, and print what it does."""
    runs = folder / "runs"
    environ = {**os.environ, "TOOLKIT_RUNS": str(runs)}
    toolkit = [sys.executable, "-m", "toolkit"]
    subprocess.run([*toolkit, "submit", *CONFIG, "--executor", "local"], env=environ, check=True)
    (run,) = all_runs(runs)
    try:
        wait_for(lambda: run.status().progress.step, 120, "the first step")
        time.sleep(limits().files_often_s + limits().files_every_s)
        counts = operations(run, seconds, folder)
    finally:
        subprocess.run([*toolkit, "cancel", run.id], env=environ, check=True)
        wait_for(lambda: run.result() is not None, 60, "the end")
    for name, count in counts.most_common():
        print(f"{count / seconds:6.2f} a second  {name}")
    flushes = sum(count for name, count in counts.items() if "sync" in name)
    return [
        record.row("operations on paths, a second", [(counts.total() - flushes) / seconds], ""),
        record.row("flushes, a second", [flushes / seconds], ""),
    ]


if __name__ == "__main__":
    main()
