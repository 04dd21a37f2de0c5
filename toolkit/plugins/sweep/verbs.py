"""What `toolkit sweep` prints: points before they are submitted, a table of their states, the best ones, or a CSV."""

from __future__ import annotations

import csv
import io
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from toolkit.base import logs
from toolkit.base.errors import EXIT_FAILED, RequestError, listing
from toolkit.base.terminal import say
from toolkit.cli import arguments, run_rows, tables
from toolkit.files import rundir
from toolkit.files.run_files import UNREADABLE, RunState
from toolkit.plugins.sweep import request, rows, submission, sweep_folder
from toolkit.plugins.sweep.request import Options
from toolkit.plugins.sweep.rows import REMOVED, PointRow
from toolkit.plugins.sweep.sweep_folder import SweepDir
from toolkit.run.submission.executors import choose_executor
from toolkit.run.submission.submit import awaited
from toolkit.slurm import shared_queue

log = logs.get(__name__)

#: A longer table is shown in part, without ``--all``.
MOST_ROWS = 40


def submit(args: Namespace) -> None:
    # The arguments have the names of the fields.
    options = Options(
        **{field.name: getattr(args, field.name) for field in fields(Options) if hasattr(args, field.name)}
    )
    asked = request.read(args.config, args.overrides, options)
    # A dry run makes all checks of a submission, also of the runs that it would wait for.
    if args.dry_run:
        executor = choose_executor(args.executor)
        waits_for = awaited(args.after, executor, shared_queue.of_user().show_jobs)
        points = submission.check(asked, Path.cwd(), executor, waits_for)
        if args.json:
            print(arguments.as_json([{"point": point.id, **point.values} for point in points]))
            return
        if not points:
            print("nothing to do: the sweep has all of these points")
            return
        cells = [[rows.shown(value) for value in point.values.values()] for point in points[:MOST_ROWS]]
        tables.Table([list(points[0].values), *cells], tables.width(args)).print()
        more = f"and {len(points) - MOST_ROWS} more\n" if len(points) > MOST_ROWS else ""
        print(f"{more}{len(points)} points, all checked; nothing was submitted")
        return
    sent = submission.submit(asked, Path.cwd(), args.executor, after=args.after)
    if args.json:
        print(
            arguments.as_json({"sweep": sent.sweep.name, "new": sent.new, "known": sent.known, "jobs": list(sent.jobs)})
        )
        return
    known = f"; {sent.known} were in it before" if sent.known else ""
    jobs = f" (Slurm job {', '.join(sent.jobs)})" if sent.jobs else ""
    say(f"sweep {sent.sweep.name}: {sent.new} of {_points(len(sent.points))} submitted{jobs}{known}")
    say(f"  `toolkit sweep status {sent.sweep.name}` shows their states")


def look_after(args: Namespace) -> int | None:
    """Carry out ``toolkit sweep VERB NAME``."""
    if len(args.overrides) != 1:
        names = listing([path.name for path in rundir.sweep_paths()]) or "none"
        raise RequestError(f"toolkit sweep {args.config}: give the name of one sweep; there are: {names}")
    sweep = sweep_folder.find(args.overrides[0])
    found = rows.of_points(sweep, run_rows.status_rows)
    metric = args.metric or rows.metric_of(sweep, found)
    verbs = {"status": _status, "retry": _retry, "stop": _stop, "best": _best, "export": _export}
    return verbs[args.config](sweep, found, metric, args)


def _status(sweep: SweepDir, found: Sequence[PointRow], metric: str, args: Namespace) -> None:
    if args.json:
        print(arguments.as_json([_as_data(each) for each in found]))
        return
    states = rows.count_states(each.state for each in found)
    counts = ", ".join(f"{count} {state}" for state, count in states.items())
    say(f"sweep {sweep.name}: {_points(len(found))}: {counts}")
    shown = found
    if len(found) > MOST_ROWS and not args.all:
        # The rows of most interest: what has failed, what runs, then the best.
        order = {id(each): number for number, each in enumerate(rows.ranked(found, metric))}

        def interest(each: PointRow) -> tuple[bool, bool, int]:
            return not each.is_to_retry, each.state != RunState.RUNNING, order.get(id(each), len(found))

        shown = sorted(found, key=interest)[:MOST_ROWS]
    _table(shown, metric, tables.width(args)).print()
    if len(shown) < len(found):
        print(f"and {len(found) - len(shown)} more: --all shows them")
    for line in _causes(found):
        say(line)


def _retry(sweep: SweepDir, found: Sequence[PointRow], metric: str, args: Namespace) -> int | None:
    failed = [each for each in found if each.is_to_retry]
    jobs, sent = submission.retry(sweep, [each.point for each in failed])
    if args.json:
        retried = [_as_data(each) for each in found if each.point.id in sent]
        print(arguments.as_json({"sweep": sweep.name, "jobs": jobs, "retried": retried}))
        return EXIT_FAILED if failed and not sent else None
    for line in _causes([*failed, *(each for each in found if each.state in (REMOVED, UNREADABLE))]):
        say(line)
    if not sent and failed:
        say(f"sweep {sweep.name}: nothing was submitted: see above why not")
        return EXIT_FAILED
    if not sent:
        say(f"sweep {sweep.name}: no point has failed; nothing was submitted")
        return None
    job = f" (Slurm job {', '.join(jobs)})" if jobs else ""
    say(f"sweep {sweep.name}: {_points(len(sent))} submitted again{job}")
    return None


def _stop(sweep: SweepDir, found: Sequence[PointRow], metric: str, args: Namespace) -> int | None:
    waiting, working, unread = submission.stop(sweep)
    if args.json:
        unknown = [run.id for run in unread]
        print(arguments.as_json({"sweep": sweep.name, "cancelled": waiting, "asked": working, "unknown": unknown}))
    else:
        say(
            f"sweep {sweep.name}: cancelled while they waited: {waiting}; asked to commit a checkpoint and end: "
            f"{working}; `toolkit sweep retry {sweep.name}` continues all"
        )
    for run, error in unread.items():
        log.warning("run %s was asked to stop; whether it does is not known: %s", run.id, error)
    return EXIT_FAILED if unread else None


def _best(sweep: SweepDir, found: Sequence[PointRow], metric: str, args: Namespace) -> int | None:
    ranked = rows.ranked(found, metric)[:10]
    if args.json:
        print(arguments.as_json([_as_data(each) for each in ranked]))
    elif not ranked:
        names = ", ".join(rows.metrics_of(found))
        known = f"there are: {names}" if names else "no run has written any yet, as run.log in a loop does"
        raise RequestError(f"sweep {sweep.name}: no run has the metric {metric.removeprefix('-')}; {known}")
    else:
        _table(ranked, metric, tables.width(args)).print()
        best = ranked[0]
        values = [f"{key}={rows.shown(value)}" for key, value in best.point.values.items()]
        print(f"best: {' '.join(values)}")
        print(f"  {metric.removeprefix('-')} {rows.value_of(best, metric):g} in run {best.run.id}")
    return None if ranked else EXIT_FAILED


def _export(sweep: SweepDir, found: Sequence[PointRow], metric: str, args: Namespace) -> None:
    if args.json:
        print(arguments.as_json([_as_data(each) for each in found]))
        return
    keys = list(dict.fromkeys(key for each in found for key in each.point.values))
    names = rows.metrics_of(found)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")  # it writes None as nothing
    writer.writerow(["run", "point", "state", *keys, "step", *names])
    for each in found:
        values = [each.point.values.get(key, "") for key in keys]
        metrics = [each.row.metrics.get(name) for name in names]
        writer.writerow([each.run.id, each.point.id, each.state, *values, each.row.step, *metrics])
    print(text.getvalue(), end="")


def _as_data(each: PointRow) -> dict[str, Any]:
    row = each.row
    return {
        "point": each.point.id,
        "run": each.run.id,
        "values": each.point.values,
        "state": each.state,
        "job_id": row.job_id,
        "step": row.step,
        "total_steps": row.total_steps,
        "attempt": row.attempt,
        "metrics": row.metrics,
        "why": each.why,
        "path": str(each.run.path),
    }


def _table(found: Sequence[PointRow], metric: str, width: int | None) -> tables.Table:
    keys = list(dict.fromkeys(key for each in found for key in each.point.values))
    name = metric.removeprefix("-")
    # A key's column is named by its last part, or by the whole key where two have the same.
    last = [key.rpartition(".")[2] for key in keys]
    short_names = [short if last.count(short) == 1 else key for key, short in zip(keys, last, strict=True)]
    head = ["RUN", *(name.upper() for name in short_names), "STATE", "JOB", "STEP", name.rpartition("/")[2].upper()]
    cells = []
    for each in found:
        step, total = each.row.step, each.row.total_steps
        steps = "" if step is None else f"{step}/{total or '?'}"
        value = rows.value_of(each, metric)
        figure = "" if value is None else f"{value:.4g}"
        values = [rows.shown(each.point.values.get(key, "")) for key in keys]
        job = each.row.job_id if each.row.executor == "slurm" else ""
        run = each.run.id if width is None else tables.short(each.run.id)
        cells.append([run, *values, each.state, job or "", steps, figure])
    return tables.Table([head, *cells], width, ("JOB",))


def _causes(found: Sequence[PointRow]) -> list[str]:
    """Return a line for each cause, with its runs. A cause has ended them, or keeps them waiting."""
    causes: dict[str, list[str]] = {}
    for each in found:
        if each.why and each.state != RunState.COMPLETED:
            causes.setdefault(f"{each.state}: {each.why}", []).append(each.run.id[-8:])
    return [
        f"{', '.join(runs[:4])}{f' and {len(runs) - 4} more' if len(runs) > 4 else ''}: {why}"
        for why, runs in causes.items()
    ]


def _points(number: int) -> str:
    return f"{number} point{'' if number == 1 else 's'}"
