"""The progress of a node's ranks: each rank's reports and the agent's digest of them.

A rank reports every second, whether anything is new or not: that is its sign of life. The agent keeps the newest report
of each rank and sends the supervisor one :class:`Digest` a second. Digests of nodes are merged like those of ranks, so
the result is as long for ten thousand ranks as for one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

#: A rank that has not reported for this long is stopped or dead, or a library holds Python's lock.
SILENT_S = 5.0
#: Time is counted in looks. The time between two of them counts as at most this long: while the whole job is stopped,
#: by ``scontrol suspend``, no rank could have made progress.
LONGEST_LOOK_S = 2.0
#: A longer report is not delivered.
MAX_BYTES = 1 << 17


@dataclass(frozen=True)
class RankReport:
    """A rank's report on itself. Rank 0 adds what a user sees of the run, and at the end the run's result."""

    attempt: int
    rank: int
    phase: str  #: see :mod:`toolkit.hang.activity`
    step: int | None  #: steps done; None: not even one in this attempt
    count: int
    fields: Mapping[str, Any] | None = None
    result: Mapping[str, Any] | None = None

    def as_bytes(self) -> bytes:
        return json.dumps(vars(self)).encode()


def parse(data: bytes) -> RankReport | None:
    """Return the report in ``data``; None for data that no rank can have written."""
    try:
        report = RankReport(**json.loads(data))
    except (ValueError, TypeError, RecursionError):
        return None
    counts = [report.attempt, report.rank, report.count]
    if report.step is not None:
        counts.append(report.step)
    if not all(type(count) is int and 0 <= count < 2**63 for count in counts):
        return None
    has_mappings = all(extra is None or isinstance(extra, dict) for extra in (report.fields, report.result))
    return report if isinstance(report.phase, str) and has_mappings else None


@dataclass(frozen=True)
class Standing:
    """How far a rank is."""

    rank: int
    phase: str | None  #: None: it has not reported yet
    step: int | None  #: steps done; None: not even one in this attempt
    still_s: float  #: since its step, counter or phase changed last
    is_silent: bool  #: it has sent nothing for ``SILENT_S``


@dataclass(frozen=True)
class Digest:
    """The progress of the ranks of one node, or of several, in an attempt."""

    attempt: int
    ranks: int  #: those that have reported
    silent: int  #: of those, the ones that have sent nothing for ``SILENT_S``
    moves: int  #: how often one of them made progress; it only grows
    least: int | None  #: steps done by the rank that has done the fewest; None: one has done none
    most: int | None  #: steps done by the rank that has done the most


def merge(digests: Iterable[Digest]) -> Digest | None:
    """Return the digest of all ranks in ``digests``, those of the newest attempt.

    Return None without any digest.
    """
    every = list(digests)
    attempt = max((digest.attempt for digest in every), default=0)
    now = [digest for digest in every if digest.attempt == attempt]
    if not now:
        return None
    return Digest(
        attempt,
        sum(digest.ranks for digest in now),
        sum(digest.silent for digest in now),
        sum(digest.moves for digest in now),
        *_bounds([digest.least for digest in now], [digest.most for digest in now]),
    )


def _bounds(least: list[int | None], most: list[int | None]) -> tuple[int | None, int | None]:
    smallest = None if None in least else min(step for step in least if step is not None)
    return smallest, max((step for step in most if step is not None), default=None)


@dataclass
class _Rank:
    position: tuple[int | None, int] | None = None  #: step and counter
    phase: str | None = None
    phases: set[str] = field(default_factory=set)  #: the phases that it has been in at this position
    moved: float = 0.0
    heard: float = 0.0


class NodeProgress:
    """The newest report of each rank of one node.

    A rank *gets on* when its step or its counter changes, or when it enters a phase that it has not been in since they
    last changed: a rank that only cycles through phases makes no progress.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looked, self._now = clock(), 0.0
        self._attempt, self._moves = 0, 0
        self._ranks: dict[int, _Rank] = {}

    def hear(self, report: RankReport) -> bool:
        """Take a report. True if it is its rank's first in this attempt. Earlier attempts' reports are ignored."""
        self._pass_time()
        if report.attempt < self._attempt:
            return False
        # A new attempt: forget the ranks of the last one.
        if report.attempt > self._attempt:
            self._attempt, self._moves, self._ranks = report.attempt, 0, {}
        is_first = report.rank not in self._ranks
        rank = self._ranks.setdefault(report.rank, _Rank())
        rank.heard = self._now
        phase, position = report.phase, (report.step, report.count)
        # A phase counts as progress only once at each position.
        if (phase, position) != (rank.phase, rank.position):
            rank.moved = self._now
            if position != rank.position:
                rank.phases.clear()
            self._moves += phase not in rank.phases
            rank.phases.add(phase)
            rank.phase, rank.position = phase, position
        return is_first

    def digest(self) -> Digest | None:
        """Return the progress of all ranks; None before the first report. Call it every ``LONGEST_LOOK_S`` or so."""
        self._pass_time()
        if not self._ranks:
            return None
        steps = [rank.position[0] for rank in self._ranks.values() if rank.position]
        silent = sum(map(self._is_silent, self._ranks.values()))
        return Digest(self._attempt, len(steps), silent, self._moves, *_bounds(steps, steps))

    def standing(self, attempt: int, rank: int) -> Standing | None:
        """Return where ``rank`` stands now; None where it has not reported in ``attempt``."""
        self._pass_time()
        known = self._ranks.get(rank) if attempt == self._attempt else None
        if known is None or known.position is None:
            return None
        return Standing(rank, known.phase, known.position[0], self._now - known.moved, self._is_silent(known))

    def _is_silent(self, rank: _Rank) -> bool:
        return self._now - rank.heard > SILENT_S

    def _pass_time(self) -> None:
        now = self._clock()
        self._now += min(now - self._looked, LONGEST_LOOK_S)
        self._looked = now
