"""The columns of `toolkit status` and `toolkit watch`: the usual ones, any metric, and any key of a run's config."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from toolkit.base.durations import as_clock, in_units
from toolkit.base.errors import RequestError, listing, nearest
from toolkit.cli import notes, run_rows
from toolkit.cli.run_rows import RunRow
from toolkit.cli.tables import Table, short
from toolkit.files.run_files import UNREADABLE, RunState, state_word


def _number(value: Any) -> str:
    """Return a figure in few characters, anything else as text."""
    if isinstance(value, float) and not value.is_integer():
        return f"{value:.4f}" if 1e-3 <= abs(value) < 1e5 else f"{value:.4g}"
    return "" if value is None else f"{value:.0f}" if isinstance(value, float) else str(value)


def ago(at: float | None) -> str:
    """Return how long ago a time was; empty if it is unknown."""
    return "" if at is None else f"{in_units(max(0.0, time.time() - at))} ago"


#: Name: the value that a column is sorted by, and its text, if that differs.
_COLUMNS: Mapping[str, tuple[Callable[[RunRow], Any], Callable[[Any, RunRow], str]]] = {
    "run": (lambda row: row.run, lambda value, _: value),
    "name": (lambda row: row.name, lambda value, _: value),
    "state": (lambda row: row.state, lambda value, _: str(value)),
    "job": (lambda row: str(row.job_id or "") if row.executor == "slurm" else "", lambda value, _: value),
    "attempt": (lambda row: row.attempt, lambda value, _: str(value)),
    "restarts": (lambda row: row.restarts, lambda value, _: str(value)),
    "step": (lambda row: row.step, lambda v, row: "" if v is None else f"{v}/{row.total_steps or '?'}"),
    "loss": (lambda row: row.loss, lambda value, _: "" if value is None else f"{value:.4f}"),
    "rate": (lambda row: row.samples_per_s, lambda v, _: "" if v is None else f"{v:,.0f}/s"),
    "left": (lambda row: row.eta_s, lambda value, _: "" if value is None else as_clock(value)),
    "goodput": (lambda row: (row.goodput or {}).get("ratio"), lambda v, _: "" if v is None else f"{v:.0%}"),
    "accuracy": (lambda row: row.metrics.get("eval/accuracy"), lambda v, _: "" if v is None else f"{v:.4f}"),
    "submitted": (lambda row: row.submitted, lambda value, _: ago(value)),
    "updated": (lambda row: row.updated, lambda value, _: ago(value)),
    "ended": (lambda row: row.ended, lambda value, _: ago(value)),
    "nodes": (lambda row: len(row.nodes), lambda value, _: str(value)),
    "waits_for": (lambda row: notes.waits_for(row) or None, lambda value, _: value or ""),
    "start": (lambda row: row.expected_start, lambda value, _: notes.start_text(value)),
    "why": (lambda row: row.why, lambda value, _: value or ""),
    "note": (lambda row: "; ".join(notes.of(row)), lambda value, _: value),
    "path": (lambda row: row.path, lambda value, _: value),
}
#: The columns without ``--columns``, and those that a narrow terminal goes without, the first one first.
USUAL = (
    *("run", "name", "state", "job", "attempt", "step", "loss", "accuracy", "rate", "left", "goodput", "submitted"),
    "note",
)
_DISPENSABLE = ("accuracy", "attempt", "goodput", "rate", "submitted", "job", "loss", "left", "step", "note", "name")


def check(names: Sequence[str], rows: Sequence[RunRow]) -> None:
    """Raise RequestError for a name that is not a column, and not a metric or a config key of any row."""
    metrics = {name for row in rows for name in row.metrics}
    keys = {name for row in rows for name in row.config}
    for name in names:
        if rows and name not in _COLUMNS and name not in metrics and name not in keys:
            valid = sorted({*_COLUMNS, *metrics, *keys})
            raise RequestError(
                f"--columns, --sort: {name!r} is no column, and no metric or config key of these runs; "
                f"{nearest(name, valid)}columns: {', '.join(_COLUMNS)}; metrics: {listing(sorted(metrics)) or 'none'}"
            )


def needs_config(names: Sequence[str]) -> bool:
    """True if one of the columns may be a config key. Only then are the configs read."""
    return any(name not in _COLUMNS and "/" not in name for name in names)


def value(row: RunRow, name: str) -> Any:
    """Return what a column holds, None if the run has no such value."""
    if name in _COLUMNS:
        return _COLUMNS[name][0](row)
    return row.metrics.get(name, row.config.get(name))


def in_order(rows: Sequence[RunRow], name: str, reverse: bool = False) -> list[RunRow]:
    """Return the rows sorted by a column. Rows without a value come last."""
    known = [row for row in rows if value(row, name) is not None]

    def key(row: RunRow) -> tuple[bool, float, str]:
        item = value(row, name)
        is_number = isinstance(item, (int, float))
        return (not is_number, float(item) if is_number else 0.0, str(item))

    known.sort(key=key, reverse=reverse)
    return known + [row for row in rows if value(row, name) is None]


def table(rows: Sequence[RunRow], names: Sequence[str] = (), width: int | None = None) -> Table:
    """Return the rows as a table, with the usual columns if no ``names`` are given.

    Among several rows within a ``width`` runs have short ids, ``queued (PENDING, Priority)`` is ``queued``, since the
    note says the reason, and an error stands without its rank. A single run has no note.
    """
    shown = names or (USUAL if len(rows) > 1 else USUAL[:-1])
    if width is not None and len(rows) > 1:
        rows = [_shortened(row) for row in rows]
    texts: list[list[str]] = []
    for name in shown:
        if name in _COLUMNS:
            get, show = _COLUMNS[name]  # once a column: there may be 10,000 rows
            texts.append([show(get(row), row) for row in rows])
        else:
            texts.append([_number(value(row, name)) for row in rows])
    drop = () if names else [name.upper() for name in _DISPENSABLE]
    return Table([[name.upper() for name in shown], *zip(*texts, strict=True)], width, drop)


def _shortened(row: RunRow) -> RunRow:
    state = state_word(str(row.state)) if row.slurm == "PENDING" else str(row.state)
    why = None if row.state == RunState.STOPPED else re.sub(r"^rank \d+ on [\w.-]+: ", "", row.why or "")
    return replace(row, run=short(row.run), state=state, why=why)


def is_over(row: RunRow) -> bool:
    """True if only a user's command continues the run."""
    return row.state in (*run_rows.OVER, UNREADABLE) or str(row.state).startswith("lost")
