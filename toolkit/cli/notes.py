"""The notes on a row of `toolkit status`: why the run ended, what it waits for, what is wrong."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from toolkit.cli import slow
from toolkit.files.run_files import RunState, waits_until
from toolkit.run.records import changes
from toolkit.slurm import states

#: States and reasons of jobs that Slurm does not start by itself.
_HOLDING_STATES = ("REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")
_FOR_EVER = ("BadConstraints", "DependencyNeverSatisfied")


def of(row: Mapping[str, Any]) -> list[str]:
    """Return the notes on a row, the most important first."""
    found = [f"damaged: {what.removeprefix(row['path'] + '/')}" for what in row["damage"]]
    if row["points"]:
        counts = ", ".join(f"{count} {state}" for state, count in row["points"].items())
        found.append(f"{counts}; `toolkit sweep status {row['run']}` lists them")
    if row["why"] and row["state"] != RunState.COMPLETED:
        found.append(row["why"])
    if (why := _held_for(row)) is not None:
        text = f"Slurm holds job {row['job_id']} ({why}); when that is mended, "
        found.append(f"{text}`scontrol release {row['job_id']}` lets it go on")
    elif row["slurm"] in states.PAUSED:
        goes_on = states.PAUSED[row["slurm"]].format(row["job_id"])
        found.append(f"Slurm has suspended job {row['job_id']}, and the run goes on {goes_on}")
    elif row["slurm"] == "REVOKED":
        found.append(f"another cluster of the federation has started job {row['job_id']}")
    elif waits := waits_for(row):
        start = start_text(row["expected_start"])
        found.append(f"{waits}; Slurm expects it to start at {start}" if start else waits)
    found += [row["save_error"]] if row["save_error"] else []
    found += [f"{host} is not used: {reason}" for host, reason in row["bad_nodes"].items()]
    found += [f"node {host}: {what}" for host, what in row["ailing_nodes"].items()]
    found += [text] if not row["silent"] and (text := slow.remark(row["stragglers"])) else []
    found += [text] if (text := loss_remark(row["metrics"])) else []
    return found + changes.lines(row["changes"])


def waits_for(row: Mapping[str, Any]) -> str:
    """Return what a run waits for; empty for one that does not wait, or for an unknown reason."""
    if row["after"] and (row["slurm"] != "PENDING" or row["reason"] in (None, "None", "Dependency")):
        return waits_until(row["after"])
    return states.in_words(row["reason"]) if _waits(row) else ""


def start_text(start: float | None) -> str:
    """Return when Slurm expects a job to start; empty if it does not say."""
    return states.expected_start(start, time.time())


def loss_remark(metrics: Any) -> str:
    """Return a remark on a loss that was not finite. Empty if it was always finite."""
    count = metrics.get("train/not_finite") if isinstance(metrics, dict) else None
    return f"the mean loss was not finite at {count:.0f} logging steps (train/not_finite)" if count else ""


def _waits(row: Mapping[str, Any]) -> bool:
    return row["slurm"] == "PENDING" and row["reason"] not in (None, "None")


def _held_for(row: Mapping[str, Any]) -> str | None:
    """Return Slurm's reason to hold the job, or None. Slurm 24.11 has states for it, 22.05 only the reasons.

    Slurm's reasons are in squeue(1) and, with blanks, in its source.
    """
    if row["slurm"] in _HOLDING_STATES:
        return row["reason"] if row["reason"] not in (None, "None") else str(row["slurm"])
    is_held = _waits(row) and ("held" in row["reason"].lower() or row["reason"] in _FOR_EVER)
    return str(row["reason"]) if is_held else None
