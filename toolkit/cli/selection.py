"""Which runs a listing shows: by state, age and name."""

from __future__ import annotations

import re
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.base.errors import RequestError, RunNotFoundError, did_you_mean
from toolkit.files import rundir
from toolkit.files.run_files import UNREADABLE, RunState, state_word
from toolkit.files.rundir import RunDir

if TYPE_CHECKING:  # every command's parser needs this module
    from toolkit.cli.run_rows import RunRow

_UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 604800}
#: Words that stand for several states, and those of runs whose own files do not say that they have ended.
GROUPS: dict[str, list[str]] = {
    "live": [state for state in RunState if not state.is_over],
    "waiting": [state for state in RunState if state.is_waiting],
    "over": [*(state for state in RunState if state.is_over), "lost"],
}
#: What ``--state`` takes.
STATES = [*map(str, RunState), "lost", "unknown", UNREADABLE, *GROUPS]


def add_arguments(parser: ArgumentParser) -> None:
    """Add the filters."""
    states = "such as failed or running,lost; also live, waiting, over, unreadable"
    parser.add_argument("--state", metavar="STATE", help=states)
    parser.add_argument("--since", metavar="TIME", help="submitted since then: 90min, 12h, 2d, 1w or 2026-01-31")
    parser.add_argument("--name", metavar="PATTERN", help="name of the config, such as 'gpt*'")


def named(texts: Sequence[str]) -> tuple[list[RunDir], list[Path]]:
    """Return the runs that ``texts`` name, and the folders of the sweeps among them. Raises RunNotFoundError."""
    runs, sweeps = list[RunDir](), list[Path]()
    for text in texts:
        try:
            runs.append(rundir.find(text))
        except RunNotFoundError as error:
            if error.sweep is None:
                raise
            from toolkit.plugins.sweep import sweep_folder

            sweep = sweep_folder.of_name(error.sweep)
            sweeps.append(sweep.path)
            runs += [run for point in sweep.points() if (run := sweep.run_of(point)).config.exists()]
    return runs, sweeps


def is_asked(args: Namespace) -> bool:
    """True if a filter was given."""
    return any((args.state, args.since, args.name))


def by_path(runs: Sequence[RunDir], args: Namespace) -> list[RunDir]:
    """Return the runs that ``--since`` and ``--name`` leave. No file is read: the paths hold both."""
    since = None if args.since is None else parse_since("--since", args.since, time.time())
    if since is not None:
        begin = rundir.id_time(since)
        runs = [run for run in runs if run.id >= begin]
    return [run for run in runs if args.name is None or fnmatchcase(run.name, args.name)]


def by_state(rows: Sequence[RunRow], states: str | None) -> list[RunRow]:
    """Return the rows in one of the states, which commas separate. Raises RequestError for an unknown one."""
    if states is None:
        return list(rows)
    wanted = set[str]()
    for word in filter(None, states.split(",")):
        if word not in STATES:
            raise RequestError(
                f"--state: unknown value {word!r}; {did_you_mean(word, STATES)}valid: {', '.join(STATES)}"
            )
        wanted |= {str(state) for state in GROUPS.get(word, [word])}
    return [row for row in rows if state_word(str(row.state)) in wanted]


def parse_since(argument: str, text: str, now: float) -> float:
    """Return the time that ``2d`` ago was, or that a date names. Raises RequestError."""
    match = re.fullmatch(r"(\d{1,6}(?:\.\d+)?) ?([a-z]+)", text)
    if match and match[2] in _UNITS:
        return max(0.0, now - float(match[1]) * _UNITS[match[2]])
    for form in ("%Y-%m-%d", "%Y-%m-%dT%H:%M", "%Y-%m-%d %H:%M"):
        try:
            return time.mktime(time.strptime(text, form))
        except (ValueError, OverflowError):
            continue
    raise RequestError(f"{argument} {text!r}: give a time such as 90min, 12h, 2d or 1w, or a date such as 2026-01-31")
