"""The notes on a row of `toolkit status`: why the run ended, what it waits for, what is wrong."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from toolkit.base import hostlist
from toolkit.base.durations import in_one_unit
from toolkit.files.run_files import RunState, RunStatus, waits_until
from toolkit.slurm import states

if TYPE_CHECKING:  # which itself needs this module
    from toolkit.cli.run_rows import RunRow

#: States and reasons of jobs that Slurm does not start by itself.
_HOLDING_STATES = ("REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")
_FOR_EVER = ("BadConstraints", "DependencyNeverSatisfied")


def of(row: RunRow) -> list[str]:
    """Return the notes on a row, the most important first."""
    found = list[str]()
    if row.points:
        counts = ", ".join(f"{count} {state}" for state, count in row.points.items())
        found.append(f"{counts}; `toolkit sweep status {row.run}` lists them")
    if row.why and row.state != RunState.COMPLETED:
        found.append(row.why)
    if (why := _held_for(row)) is not None:
        text = f"Slurm holds job {row.job_id} ({why}); when that is fixed, "
        found.append(f"{text}`scontrol release {row.job_id}` lets it go on")
    elif row.slurm in states.PAUSED:
        goes_on = states.PAUSED[row.slurm].format(row.job_id)
        found.append(f"Slurm has suspended job {row.job_id}, and the run goes on {goes_on}")
    elif row.slurm == "REVOKED":
        found.append(f"another cluster of the federation has started job {row.job_id}")
    elif waits := waits_for(row):
        start = start_text(row.expected_start)
        found.append(f"{waits}; Slurm expects it to start at {start}" if start else waits)
    found += [row.save_error] if row.save_error else []
    found += [f"{host} is not used: {reason}" for host, reason in row.bad_nodes.items()]
    found += [f"node {host}: {what}" for host, what in row.ailing_nodes.items()]
    found += [text] if not row.silent and (text := remark(row.stragglers)) else []
    found += [text] if (text := loss_remark(row.metrics)) else []
    return found


def waits_for(row: RunRow) -> str:
    """Return what a run waits for; empty for one that does not wait, or for an unknown reason."""
    reason = _pending_reason(row)
    return waits_until(row.after) if row.after and reason in ("", "Dependency") else states.in_words(reason)


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


def stragglers(status: RunStatus) -> list[dict[str, Any]]:
    """Return the newest attempt's stragglers, each with ``slow_s``. ``until`` is None for those that are slow now."""
    now, rows = status.updated or 0.0, list[dict[str, Any]]()
    for straggler in status.progress.stragglers:
        # A straggler of an attempt that has ended was slow until that end.
        until = straggler.until or status.ended
        slow_s = round((until or now) - straggler.since, 1)
        rows.append({**straggler.to_json(), "until": until, "slow_s": slow_s})
    return rows


def remark(slow: Sequence[Mapping[str, Any]]) -> str:
    """Name the nodes that are slow now, in a few words; empty if none is."""
    return "; ".join(_what(entry) for entry in slow if entry["until"] is None)


def lines(slow: Sequence[Mapping[str, Any]], nodes: Sequence[str]) -> list[str]:
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
