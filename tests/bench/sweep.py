"""Submitting and watching 2,000 points: seconds, calls of sbatch, questions to Slurm, beside submitit's map_array.

Slurm is the one in memory, so the figures are the submitter's own. submitit's are the files that its
``SlurmExecutor.map_array`` writes for as many tasks, before it calls sbatch once.

    python -m tests.bench.sweep [--points 2000]
"""

import argparse
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from tests.bench import record
from toolkit.cli import run_rows
from toolkit.files.rundir import RunDir
from toolkit.plugins.sweep import request, rows, submission
from toolkit.plugins.sweep.request import Options
from toolkit.plugins.testing.fake_slurm import FakeSlurm
from toolkit.slurm.shared_queue import SharedQueue

ROOT = Path(__file__).parents[2]
Value = TypeVar("Value")


def timed(what: str, call: Callable[[], Value], times: dict[str, list[float]]) -> Value:
    """Print the wall and CPU seconds of a call; note the wall seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    value = call()
    times[what] = [time.perf_counter() - wall]
    print(f"{what:52} {times[what][0]:6.2f} s wall {time.process_time() - cpu:6.2f} s CPU", flush=True)
    return value


def with_submitit(count: int, folder: Path) -> None:
    """Write the files of submitit for an array of ``count`` calls of a function."""
    from submitit.core.utils import DelayedSubmission

    for number in range(count):
        path = folder / f"{number}_submitted.pkl"
        DelayedSubmission(print, 0.1, number).dump(path)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--points", type=int, default=2_000)
    record.add_option(parser)
    args = parser.parse_args(argv)
    count = args.points
    slurm, times = FakeSlurm(), dict[str, list[float]]()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TOOLKIT_RUNS"] = f"{folder}/runs"
        axes = [f"optim.lr=log(1e-4,1e-1,{math.ceil(count / 100)})", "train.seed=0..99"]
        asked = request.read(ROOT / "configs/digits_ddp.yaml", axes, Options(max_running=100))
        sent = timed(f"submit {count} points", lambda: submission.submit(asked, ROOT, "slurm", slurm), times)
        # The second submission must find all points in the record, and send none.
        timed("the same again: nothing new", lambda: submission.submit(asked, ROOT, "slurm", slurm), times)
        queue = SharedQueue(slurm, None)

        def rows_of(runs: Sequence[RunDir]) -> list[run_rows.RunRow]:
            return run_rows.with_slurm(run_rows.read_rows(runs), queue.show_jobs)

        look = partial(rows.of_points, sent.sweep, rows_of)
        found = timed("status of all, in the queue", look, times)
        (Path(folder) / "submitit").mkdir()
        timed("the files of as many tasks, by submitit", lambda: with_submitit(count, Path(folder) / "submitit"), times)
        calls, most = len(slurm.submitted), math.ceil(sent.new / slurm.max_array_size)
        print(f"calls of sbatch: {calls} (at least {most} arrays); questions of status: {len(slurm.asked_for_jobs)}")
        print(f"points in the table: {len(found)}, {sum(each.state == 'queued' for each in found)} of them queued")
    peer = "the files of as many tasks, by submitit"
    records = [record.row(what, took, to=times[peer], peer=peer) for what, took in times.items()]
    records.append(record.row("calls of sbatch", [calls], "", better="less"))
    records.append(record.row("questions to Slurm by the status", [len(slurm.asked_for_jobs)], "", better="less"))
    record.write(args.json, records)
    # A sweep costs the fewest arrays that fit the site's limit, and its status one question.
    return 0 if (calls, len(slurm.asked_for_jobs)) == (most, 1) else 1


if __name__ == "__main__":
    sys.exit(main())
