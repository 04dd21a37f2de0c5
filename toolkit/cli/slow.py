"""The texts of `status` and `why` about stragglers. Rank 0 finds the facts, see `toolkit.plugins.report.stragglers`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.base import hostlist
from toolkit.base.durations import in_one_unit
from toolkit.files.run_files import RunStatus


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
