"""The table of `toolkit status` and `toolkit watch`: its columns, the notes on a row, and what stands below it.

A column is one of the usual ones, any metric, or any key of a run's config. The notes say why the run ended, what it
waits for, what is wrong.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.base import hostlist, terminal
from toolkit.base.durations import as_clock, in_one_unit, in_units
from toolkit.base.errors import RequestError, did_you_mean, listing
from toolkit.cli.run_rows import OVER, RunRow, given_words
from toolkit.cli.tables import Table, short
from toolkit.files import rundir
from toolkit.files.run_files import UNREADABLE, RunState, dependency_sentence, state_word
from toolkit.files.rundir import RunDir
from toolkit.metrics import goodput
from toolkit.slurm import states


def _number(value: Any) -> str:
    """Return a figure in few characters, anything else as text."""
    if isinstance(value, float) and not value.is_integer():
        return f"{value:.4f}" if 1e-3 <= abs(value) < 1e5 else f"{value:.4g}"
    return "" if value is None else f"{value:.0f}" if isinstance(value, float) else str(value)


def ago(at: float | None) -> str:
    """Return how long ago a time was; empty if it is unknown."""
    return "" if at is None else f"{in_units(time.time() - at)} ago"


def _guess(row: RunRow) -> str:
    """Return the mark of what was read from a script's output."""
    return "~" if row.printed else ""


def _step(row: RunRow) -> str:
    if row.points:
        return f"{row.points.get(RunState.COMPLETED, 0)} of {sum(row.points.values())} done"
    steps = "" if row.step is None else f"{row.step}/{row.total_steps or '?'}"
    if (epoch := row.printed.get("epoch")) is not None:
        epochs = row.printed.get("epochs")
        steps = f"epoch {epoch}{f'/{epochs}' if epochs else ''} {steps}".rstrip()
    return steps and _guess(row) + steps


def _rate(row: RunRow) -> str:
    if steps_per_s := row.printed.get("steps_per_s"):
        return f"~{steps_per_s:.3g} steps/s"
    return "" if row.samples_per_s is None else f"{row.samples_per_s:,.0f}/s"


#: Name: the value that a column is sorted by, and its text, if that differs.
_COLUMNS: Mapping[str, tuple[Callable[[RunRow], Any], Callable[[Any, RunRow], str]]] = {
    "run": (lambda row: row.run, lambda value, _: value),
    "name": (lambda row: row.name, lambda value, _: value),
    "state": (lambda row: row.state, lambda value, _: str(value)),
    "job": (lambda row: str(row.job_id or "") if row.executor == "slurm" else "", lambda value, _: value),
    "attempt": (lambda row: row.attempt, lambda value, _: str(value)),
    "restarts": (lambda row: row.restarts, lambda value, _: str(value)),
    "step": (lambda row: row.step, lambda _, row: _step(row)),
    "loss": (lambda row: row.loss, lambda v, row: "" if v is None else f"{_guess(row)}{v:.4f}"),
    "rate": (lambda row: row.samples_per_s, lambda _, row: _rate(row)),
    "left": (lambda row: row.eta_s, lambda v, row: "" if v is None else f"{_guess(row)}{as_clock(v)}"),
    "goodput": (lambda row: (row.goodput or {}).get("ratio"), lambda v, _: "" if v is None else f"{v:.0%}"),
    "accuracy": (lambda row: row.metrics.get("eval/accuracy"), lambda v, _: "" if v is None else f"{v:.4f}"),
    "submitted": (lambda row: row.submitted, lambda value, _: ago(value)),
    "updated": (lambda row: row.updated, lambda value, _: ago(value)),
    "ended": (lambda row: row.ended, lambda value, _: ago(value)),
    "nodes": (lambda row: len(row.nodes), lambda value, _: str(value)),
    "waits_for": (lambda row: waits_for(row) or None, lambda value, _: value or ""),
    "start": (lambda row: row.expected_start, lambda value, _: start_text(value)),
    "why": (lambda row: row.why, lambda value, _: value or ""),
    "note": (lambda row: "; ".join(notes_of(row)), lambda value, _: value),
    "path": (lambda row: row.path, lambda value, _: value),
}
#: The columns without ``--columns``, and those that a narrow terminal goes without, the first one first.
USUAL = (
    *("run", "name", "state", "job", "attempt", "step", "loss", "accuracy", "rate", "left", "goodput", "submitted"),
    "note",
)
_DISPENSABLE = ("accuracy", "attempt", "submitted", "goodput", "rate", "job", "loss", "left", "step", "note", "name")


def check(names: Sequence[str], rows: Sequence[RunRow]) -> None:
    """Raise RequestError for a name that is not a column, and not a metric or a config key of any row."""
    metrics = {name for row in rows for name in row.metrics}
    keys = {name for row in rows for name in row.config}
    for name in names:
        if rows and name not in _COLUMNS and name not in metrics and name not in keys:
            valid = sorted({*_COLUMNS, *metrics, *keys})
            raise RequestError(
                f"--columns, --sort: {name!r} is not a column, metric or config key of these runs; "
                f"{did_you_mean(name, valid)}columns: {', '.join(_COLUMNS)}; metrics: "
                f"{listing(sorted(metrics)) or 'none'}"
            )


def needs_config(names: Sequence[str]) -> bool:
    """True if one of the columns may be a config key. Only then are the configs read."""
    return any(name not in _COLUMNS and "/" not in name for name in names)


def value(row: RunRow, name: str) -> Any:
    """Return what a column holds, None if the run has no such value."""
    if name in _COLUMNS:
        return _COLUMNS[name][0](row)
    return row.metrics.get(name, row.config.get(name))


def cell(row: RunRow, name: str) -> str:
    """Return the text of one cell of the table."""
    if name not in _COLUMNS:
        return _number(value(row, name))
    get, show = _COLUMNS[name]
    return show(get(row), row)


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
    return row.state in (*OVER, UNREADABLE) or str(row.state).startswith("lost")


#: More rows than this are counted by state.
MOST_UNCOUNTED = 20


def print_rows(rows: list[RunRow], names: Sequence[str] = (), width: int | None = None) -> None:
    """Print the rows as a table of at most ``width`` characters, with the columns ``names`` or the usual ones.

    Below it are all facts about a single run, in sentences, or the number of runs by state where there are many.
    """
    if not rows:
        print(f"no runs under {rundir.runs_root()}")
        return
    shown = table(rows, names, width)
    shown.print()
    if len(rows) == 1:
        _print_one(rows[0])
        return
    if len(rows) > MOST_UNCOUNTED:
        terminal.say(count_by_state(rows))
    if shown.is_truncated and not names:
        terminal.say("`toolkit status RUN` shows all of one run, --wide shows all columns")


def _print_one(row: RunRow) -> None:
    """Print the notes, what to do next, the words of a script, where the time went and what is used."""
    run, state, lines = RunDir(Path(row.path)), str(row.state), notes_of(row)
    # Only its user brings such a run back.
    if state != RunState.COMPLETED and (state in OVER or state.startswith("lost")):
        from toolkit.run.attempt import advice  # reads configs

        lines.append(f"next: {advice.of(run, state)}")
    lines += [given_words(run), goodput.sentence(row.goodput)]
    if isinstance(row.state, RunState) and row.state.has_ranks:
        lines.append(row.using)
    for text in filter(None, lines):
        terminal.say(text)


def count_by_state(rows: Sequence[RunRow]) -> str:
    """Return how many rows are in each state, the most first."""
    counts = Counter(state_word(str(row.state)) for row in rows)
    return f"{len(rows)} runs: " + ", ".join(f"{count} {state}" for state, count in counts.most_common())


# ------------------------------------------------------------------------------------------------------- notes on a row
#: States and reasons of jobs that Slurm does not start by itself.
_HOLDING_STATES = ("REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")
_FOR_EVER = ("BadConstraints", "DependencyNeverSatisfied")


def notes_of(row: RunRow) -> list[str]:
    """Return the notes on a row, the most important first."""
    found = list[str]()
    if row.points:
        counts = ", ".join(f"{count} {state}" for state, count in row.points.items())
        best = "".join(f"; best {name}: {_number(value)}" for name, value in row.metrics.items())
        found.append(f"{counts}{best}; `toolkit sweep status {row.run}` lists them")
    if row.why and row.state != RunState.COMPLETED:
        found.append(row.why)
    if held := hold_reason(row):
        found.append(held)
    elif row.slurm in states.PAUSED:
        remedy = states.PAUSED[row.slurm].format(row.job_id)
        found.append(f"Slurm has suspended job {row.job_id}, and the run continues {remedy}")
    elif row.slurm == "REVOKED":
        found.append(f"another cluster of the federation has started job {row.job_id}")
    elif waits := waits_for(row):
        start = start_text(row.expected_start)
        found.append(f"{waits}; Slurm expects it to start at {start}" if start else waits)
    found += [row.save_error] if row.save_error else []
    found += [f"{host} is not used: {reason}" for host, reason in row.bad_nodes.items()]
    found += [f"node {host}: {what}" for host, what in row.degraded_nodes.items()]
    found += [text] if not row.silent and (text := straggler_remark(row.stragglers)) else []
    found += [text] if (text := loss_remark(row.metrics)) else []
    found += filter(None, [checkpoint_remark(row.printed)])
    return found


def checkpoint_remark(printed: Mapping[str, Any]) -> str:
    """Return which checkpoint a script has written itself, by its ``OutputFigures``; empty if none is seen."""
    if not printed.get("checkpoint"):
        return ""
    saved = ago(printed["checkpoint_saved"])
    return f"its own newest checkpoint, by name and time: {printed['checkpoint']}, {saved}"


def hold_reason(row: RunRow) -> str:
    """Return why Slurm holds a run's job in the queue, and what releases it; empty for a job that is not held."""
    if (why := _held_for(row)) is None:
        return ""
    if why == "JobHeldAdmin":  # Slurm refuses the release to the job's user
        return f"an administrator holds job {row.job_id} ({why}), and can let it continue"
    fixed = f"Slurm holds job {row.job_id} ({why}); when that is fixed, "
    return f"{fixed}`scontrol release {row.job_id}` lets it continue"


def waits_for(row: RunRow) -> str:
    """Return what a run waits for; empty for one that does not wait, or for an unknown reason."""
    reason = _pending_reason(row)
    return (
        dependency_sentence(row.after) if row.after and reason in ("", "Dependency") else states.describe_reason(reason)
    )


def start_text(start: float | None) -> str:
    """Return when Slurm expects a job to start; empty if it does not say."""
    return states.expected_start(start, time.time())


def loss_remark(metrics: Any) -> str:
    """Return a remark on a loss that was not finite. Empty if it was always finite."""
    count = metrics.get("train/not_finite") if isinstance(metrics, dict) else None
    return f"the mean loss was not finite at {count:.0f} logging steps (train/not_finite)" if count else ""


def _held_for(row: RunRow) -> str | None:
    """Return Slurm's reason, see squeue(1), to hold the job, or None. Slurm 24.11 has states for it, too."""
    if row.slurm in _HOLDING_STATES:
        return row.reason if row.reason not in (None, "None") else row.slurm
    reason = _pending_reason(row)
    return reason if "held" in reason.lower() or reason in _FOR_EVER else None


def _pending_reason(row: RunRow) -> str:
    return "" if row.slurm != "PENDING" or row.reason is None or row.reason == "None" else row.reason


def straggler_remark(slow: Sequence[Mapping[str, Any]]) -> str:
    """Name the nodes that are slow now, in a few words; empty if none is."""
    return "; ".join(_what(entry) for entry in slow if entry["until"] is None)


def straggler_lines(slow: Sequence[Mapping[str, Any]], nodes: Sequence[str]) -> list[str]:
    """Return lines about the nodes that are or were slow, and about what to do."""
    if not slow:
        return []
    hosts = hostlist.compress(sorted(entry["host"] for entry in slow))
    leave_out = f"; to leave it out: cluster.exclude={hosts}" if len(nodes) > len(slow) else ""
    look = f"  all ranks wait for the slowest: see what else runs there, and how hot it is{leave_out}"
    return [*(f"slow: {_what(entry)}" for entry in slow), look, ""]


def _what(entry: Mapping[str, Any]) -> str:
    verb = "is" if entry["until"] is None else "was"
    ranks = hostlist.compress(map(str, entry["ranks"])).strip("[]")
    who = f"{entry['host']} (rank{'s' * (len(entry['ranks']) > 1)} {ranks})"
    ratio = f"{entry['ratio']:.1f}" if entry["ratio"] >= 1.2 else f"{entry['ratio']:.2f}"
    return f"{who} {verb} {ratio} times slower than the others for {in_one_unit(entry['slow_s'])}"
