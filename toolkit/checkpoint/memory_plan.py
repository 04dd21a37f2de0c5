"""What the ranks agree on at a start.

That is the newest state with all parts in memory, and who sends which part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.checkpoint.memory_file import Moment


@dataclass(frozen=True)
class Transfer:
    """A part that rank ``source``, whose node holds it, sends to rank ``target``.

    It is that of rank ``of``, or with None the common part.
    """

    source: int
    target: int
    of: int | None


@dataclass(frozen=True)
class RestorePlan:
    """What rank 0 tells all ranks at a start."""

    moment: Moment | None = None  #: None: nothing is loaded from memory
    without: Sequence[int] = ()  #: ranks that have no files: then no rank keeps anything
    transfers: Sequence[Transfer] = ()
    has_partners: bool = False  #: all nodes have the same number of ranks, and there are at least two nodes

    @staticmethod
    def of_json(told: Mapping[str, Any]) -> RestorePlan:
        """Return the plan from the JSON of :func:`dataclasses.asdict`."""
        moment = None
        if told["moment"] is not None:
            attempt, step = told["moment"]
            moment = attempt, step
        transfers = [Transfer(**each) for each in told["transfers"]]
        return RestorePlan(moment, told["without"], transfers, told["has_partners"])


@dataclass(frozen=True)
class MemoryReport:
    """What a rank reports at a start."""

    node: int  #: the first rank of its node
    local_world_size: int
    has_files: bool = True
    held: Sequence[tuple[int, int, int | None]] = ()  #: attempt, step and part; from its node's first rank only


def plan_restore(reports: Mapping[int, MemoryReport], newer_than: int) -> RestorePlan:
    """Pick the newest moment with all parts held, and who sends which part.

    Its step is above ``newer_than``.
    """
    without = [rank for rank, report in sorted(reports.items()) if not report.has_files]
    if without:
        return RestorePlan(without=without)
    nodes = {rank: report for rank, report in reports.items() if rank == report.node}
    sizes = {report.local_world_size for report in reports.values()}
    has_partners = len(nodes) > 1 and len(sizes) == 1
    # Which nodes hold each part of each moment.
    holders: dict[tuple[Moment, int | None], list[int]] = {}
    for node, report in sorted(nodes.items()):
        for attempt, step, of in report.held:
            holders.setdefault(((attempt, step), of), []).append(node)
    # A state is usable only with the common part and every rank's own.
    parts = [None, *sorted(reports)]
    whole = []
    for moment in {moment for moment, _ in holders}:
        if moment[1] > newer_than and all((moment, of) in holders for of in parts):
            whole.append(moment)
    if not whole:
        return RestorePlan(has_partners=has_partners)
    moment = max(whole)
    transfers = []
    # The common part goes to each node that lacks it, from first rank to first rank.
    for number, node in enumerate(sorted(nodes)):
        sources = holders[moment, None]
        if node not in sources:  # the holders take turns as senders
            transfers.append(Transfer(sources[number % len(sources)], node, None))
    # Each rank's own part goes to the rank if its node lacks it, from a rank on the node that holds it.
    for rank, report in sorted(reports.items()):
        sources = holders[moment, rank]
        if report.node not in sources:
            node = sources[0]
            place = (rank - report.node) % nodes[node].local_world_size  # of the rank with the same place on that node
            transfers.append(Transfer(node + place, rank, rank))
    return RestorePlan(moment, (), transfers, has_partners)
