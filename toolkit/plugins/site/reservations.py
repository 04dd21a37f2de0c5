"""Reservations that would hold a new job back, such as one for maintenance.

Slurm starts no job that could still run when its nodes are reserved. It says so only in the reason of a job that waits.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

from toolkit.base import hostlist
from toolkit.base.durations import in_units
from toolkit.base.errors import RequestError, SlurmError
from toolkit.config import ClusterConfig
from toolkit.slurm.commands import Slurm


@dataclass(frozen=True)
class Reservation:
    """Nodes that are kept from other jobs for a time."""

    name: str
    start: float
    end: float
    nodes: frozenset[str]


def holding_back(cluster: ClusterConfig) -> str:
    """Return which reservation leaves too few nodes for a job that starts now, with the time limit that would fit.

    Empty where none does, or Slurm does not answer, and for a job that names its reservation.
    """
    if "reservation" in cluster.extra:
        return ""
    nodes = cluster.nodes + cluster.spare_nodes
    return _holding_back(
        cluster.partition, nodes, cluster.time_min, cluster.save_before_limit_s, int(time.time() // 60)
    )


@lru_cache(maxsize=16)  # a sweep checks its points one by one
def _holding_back(partition: str | None, nodes: int, time_min: int, save_before_limit_s: int, minute: int) -> str:
    slurm, now = Slurm(), time.time()
    try:
        near = [each for each in _reservations(slurm) if now < each.end and each.start < now + time_min * 60]
        there = _nodes_of(partition, slurm) if near else frozenset()
    except (SlurmError, RequestError, ValueError):
        return ""
    reserved = there.intersection(chain.from_iterable(each.nodes for each in near))
    if len(there - reserved) >= nodes or nodes > len(there):
        return ""
    first = min(near, key=lambda each: each.start)
    begin, end = (time.strftime("%a %H:%M", time.localtime(at)) for at in (first.start, first.end))
    begins = f"begins in {in_units(first.start - now)}, {begin}," if first.start > now else f"has begun, {begin},"
    fits_min = int((first.start - now) // 60) - 1
    advice = ""
    if fits_min * 60 > save_before_limit_s:
        advice = f"; with cluster.time_min={fits_min} it can start before, and an unfinished run continues later"
    return (
        f"the reservation {first.name} {begins} on {len(reserved)} of the {len(there)} nodes here: a job of {time_min} "
        f"min waits for its end, {end}{advice}"
    )


def _reservations(slurm: Slurm) -> Iterator[Reservation]:
    for block in re.split(r"\n\s*\n", slurm.ask(["scontrol", "show", "reservation"])):
        pairs = dict(re.findall(r"(\w+)=(\S*)", block))
        if pairs.get("Nodes", "(null)") != "(null)":
            start, end = float(pairs["StartTime"]), float(pairs["EndTime"])  # see plain_environment
            yield Reservation(pairs["ReservationName"], start, end, frozenset(hostlist.expand(pairs["Nodes"])))


def _nodes_of(partition: str | None, slurm: Slurm) -> frozenset[str]:
    """Return the nodes of these partitions, or of the default one, that can be used."""
    rows = slurm.ask(["sinfo", "--all", "--noheader", "--responding", "--format=%P|%N"]).split()
    nodes = set[str]()
    for name, _, names in (row.partition("|") for row in rows):
        if name.rstrip("*") in partition.split(",") if partition else name.endswith("*"):
            nodes |= {*hostlist.expand(names)}
    return frozenset(nodes)
