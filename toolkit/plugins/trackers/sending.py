"""`toolkit sync`: once, or again and again until the runs have ended."""

from __future__ import annotations

import csv
import io
import math
import sys
import time
from collections.abc import Sequence

from toolkit.base import fsio, logs, terminal
from toolkit.base.errors import EXIT_DONE, TrackerError
from toolkit.cli import arguments
from toolkit.files.rundir import RunDir
from toolkit.plugins.trackers import build_tracker
from toolkit.plugins.trackers.sync import RunSync, SyncOutcome, csv_rows, final_step, identity

#: From one look at the files to the next.
EVERY_S = 5.0
#: The first columns of our CSV files: only such a file is replaced.
CSV_BEGIN = "run,step,wall_time"

log = logs.get(__name__)


def send(runs: Sequence[RunDir], name: str, project: str | None, *, follow: bool, everything: bool) -> bool:
    """Send the runs' metrics and print what was sent. False if a tracker was away at the end.

    With ``follow`` this repeats until all runs have ended. A tracker that is away meanwhile is tried again.
    """
    left, away = list(runs), set[RunDir]()
    seen: dict[RunDir, tuple[bool, float]] = {}
    while left:
        for run in list(left):
            is_over = run.result([]) is not None  # before the look at its metrics: nothing is missed
            state = is_over, math.inf if everything else final_step(run)
            # The tracker is not asked while there is nothing new for it.
            if everything or is_over or seen.get(run) != state:
                if _sent(
                    run, name, project, everything=everything, is_told=run not in away, is_last=is_over or not follow
                ):
                    seen[run] = state
                    away.discard(run)
                else:
                    away.add(run)
            if is_over or not follow:
                left.remove(run)
        if left:
            time.sleep(EVERY_S)
    return not away


def _sent(run: RunDir, name: str, project: str | None, *, everything: bool, is_told: bool, is_last: bool) -> bool:
    """Send one run's metrics. False if the tracker is away, which is printed if ``is_told``."""
    try:
        tracker = build_tracker(name, identity(run, project))
        outcome = RunSync(run, name, tracker).send(everything)
    except TrackerError as error:
        if is_told or is_last:
            terminal.say(f"toolkit: error: {run.name}/{run.id}: {error}", sys.stderr)
        return False
    if outcome.points_sent or is_last:
        print(f"{run.name}/{run.id}: {tracker.place}\n{_lines(outcome)}", flush=True)
    return True


def _lines(outcome: SyncOutcome) -> str:
    line = f"  {outcome.points_sent} points sent, {outcome.points} there"
    line += f" up to step {outcome.step}" if outcome.step is not None else ""
    if outcome.held_back:
        line += f"\n  {outcome.held_back} steps are held back: a resume would make them again (--all sends them)"
    return line


def write_csv(runs: Sequence[RunDir], to: str | None, *, follow: bool) -> int:
    """Write all points of the runs as one table."""
    target = arguments.replaceable_path("--to", to, CSV_BEGIN) if to else None
    damage: list[str] = []
    while True:
        # Look for the ends before the metrics are read: nothing written since is missed.
        is_over = all(run.result([]) is not None for run in runs)
        if target is None:
            csv.writer(sys.stdout, lineterminator="\n").writerows(csv_rows(runs, damage))
        else:
            text = io.StringIO()
            csv.writer(text, lineterminator="\n").writerows(csv_rows(runs, damage))
            fsio.write_atomic(target, text.getvalue())
        if not follow or is_over:
            break
        time.sleep(EVERY_S)
    for line in damage:
        log.warning("%s", line)
    return EXIT_DONE
