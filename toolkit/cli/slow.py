"""How `status` and `why` speak of nodes that are slow for long; the facts are rank 0's, see `toolkit.metrics.pace`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.cluster import hostlist

Straggler = Mapping[str, Any]


def remark(slow: Sequence[Straggler], now: float) -> str:
    """One line about those that are slow now, empty if none is."""
    told = [f"{_who(s)} {s['ratio']:.1f} times slower for {_span(now - s['since'])}" for s in slow if s["until"] is None]
    return f"slow: {'; '.join(told)}" if told else ""


def lines(slow: Sequence[Straggler], nodes: Sequence[str], now: float) -> list[str]:
    """A line for each node that was slow for long, and what to do about them."""
    if not slow:
        return []
    told = [
        f"slow: {_who(s)} {'is' if s['until'] is None else 'was'} {s['ratio']:.1f} times slower than the others"
        f" for {_span((s['until'] or now) - s['since'])}"
        for s in slow
    ]
    hosts = hostlist.compress([s["host"] for s in slow])
    look = f"see what else runs there, and how warm it is (`toolkit tensorboard`: ranks); all ranks wait for the slowest"
    leave_out = f"; to leave it out: cluster.exclude={hosts}" if len(nodes) > len(slow) else ""
    return [*told, f"  {look}{leave_out}"]


def _who(straggler: Straggler) -> str:
    ranks = [str(rank) for rank in straggler["ranks"]]
    return f"{straggler['host']} (rank{'s' * (len(ranks) > 1)} {', '.join(ranks)})"


def _span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
