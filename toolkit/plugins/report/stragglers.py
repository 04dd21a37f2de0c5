"""The ranks' own step times compared: what TensorBoard gets, and which ranks are stragglers, slow for long.

In synchronous training every rank has the same wall time, that of the slowest. A rank's own time of a step is the time
that no other rank can lengthen: getting its data and the forward pass, up to where the last backward pass begins to
wait for the others' gradients. It shows a slow CPU, GPU, disk or loader, also where that does not change the others'
own times. It does not show a slow network, which makes both sides wait.

Of a run's attempts TensorBoard shows which attempt made each step, where the time went, and the cost of restarts.
"""

from __future__ import annotations

import os
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any

from toolkit.base import hostlist
from toolkit.files.run_files import AttemptStart, RunProgress, Straggler
from toolkit.files.rundir import RunDir
from toolkit.metrics import goodput
from toolkit.metrics.goodput import PARTS, TimeBreakdown
from toolkit.metrics.sinks import MOST_CURVES
from toolkit.plugins.node_watch import efficiency
from toolkit.ranks.session import Session


class StragglerDetector:
    """Compares the ranks' own times of a step, on rank 0."""

    def __init__(self, session: Session) -> None:
        self.rank, self.world_size = session.rank, session.world_size
        # Each rank leaves its node's name in the store; rank 0 reads the names of slow ranks only.
        self._store = session.store
        self._store.set(_host_key(self.rank), os.environ.get("SLURMD_NODENAME") or socket.gethostname())
        self._stragglers = Stragglers(cache(self._host_of))

    def compare(self, own_s: Sequence[float]) -> dict[str, float]:
        """Return scalars that compare the ranks' own seconds a step. Empty for one rank, and on all but rank 0."""
        if self.rank != 0 or self.world_size == 1:
            return {}
        self._stragglers.update(own_s)
        slowest, usual = max(range(len(own_s)), key=own_s.__getitem__), usual_of(own_s)
        figures = {
            "world/own_step_s": usual,
            "world/slowest_rank": float(slowest),
            "world/slowest_ratio": own_s[slowest] / usual if usual else float("nan"),
        }
        if self.world_size <= MOST_CURVES:
            digits = len(str(self.world_size - 1))
            figures |= {f"world_own_step_s/rank_{rank:0{digits}}": own for rank, own in enumerate(own_s) if own}
        return figures

    def stragglers(self) -> list[dict[str, Any]]:
        """Return the nodes that are or were slow for long, as `toolkit.files.run_files.Straggler` in JSON."""
        return [straggler.to_json() for straggler in self._stragglers.named()]

    def _host_of(self, rank: int) -> str:
        return self._store.get(_host_key(rank)).decode()


def _host_key(rank: int) -> str:
    return f"toolkit/host/{rank}"


#: A rank is slow above this multiple of the other ranks' median. Ranks on equal hardware differ by a few percent, on a
#: busy shared node by ten or twenty; a throttled GPU, a failing disk or another user's job on the CPUs costs more.
SLOW_RATIO = 1.3
#: A rank is slow for long if it is slow in this many logging windows in a row that span this many seconds. A data set's
#: cold start, a burst on the shared disk and a garbage collection are over before.
WINDOWS, SPAN_S = 5, 60.0
#: A rank that is only a little slower is told from noise by more windows. They are taken in blocks of at least so many
#: windows and seconds. The median of a block is not moved by a burst that is shorter than half of it.
BLOCK_WINDOWS, BLOCK_S = 15, 300.0
#: It is slow if the median is above this ratio in so many blocks in a row; it has recovered at the first one below the
#: second ratio. ``python -m tests.scale "slow ranks"`` shows how often that is wrong, and how soon it is right.
SLIGHT_RATIO, SLIGHT_BLOCKS, WELL_RATIO = 1.06, 6, 1.03


@dataclass
class _Streak:
    """Windows in a row in which a rank was slow."""

    since: float
    windows: int = 0
    ratios: float = 0.0
    until: float | None = None  #: when it ended; None while it continues

    @property
    def ratio(self) -> float:
        return self.ratios / self.windows


class Stragglers:
    """Names the nodes whose ranks are slow for long. It remembers those that have recovered since.

    The unit is the rank: on a node with one throttled GPU only that rank is slow, and all others wait for it.
    ``host_of`` is called for slow ranks only.
    """

    def __init__(
        self,
        host_of: Callable[[int], str],
        *,
        windows: int = WINDOWS,
        span_s: float = SPAN_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._host_of, self._windows, self._span_s, self._clock = host_of, windows, span_s, clock
        self._began = clock()
        self._running: dict[int, _Streak] = {}
        self._named: dict[int, _Streak] = {}
        self._slight: dict[int, _Streak] = {}  #: blocks in a row
        self._block: list[Sequence[float]] = []  #: the ratios of all ranks in each window of the block
        self._block_began = self._began

    def update(self, own_s: Sequence[float]) -> None:
        """Judge the window that has ended. A step in it took rank r ``own_s[r]`` seconds of its own."""
        now, usual = self._clock(), usual_of(own_s)
        # A rank that was named keeps its streak there, which gets an end when the rank recovers.
        for rank, seconds in enumerate(own_s):
            if seconds > SLOW_RATIO * usual > 0.0:
                streak = self._running.setdefault(rank, _Streak(self._began))
                streak.windows += 1
                streak.ratios += seconds / usual
                if streak.windows >= self._windows and now - streak.since >= self._span_s:
                    self._named[rank] = streak
            elif rank in self._running:
                self._running.pop(rank).until = now
        self._began = now
        if usual:
            self._block.append([seconds / usual for seconds in own_s])
        if len(self._block) >= BLOCK_WINDOWS and now - self._block_began >= BLOCK_S:
            self._end_block(now)

    def _end_block(self, now: float) -> None:
        """Judge the block that has ended: which ranks were a little slower throughout."""
        began, self._block_began = self._block_began, now
        block, self._block = self._block, []
        for rank, ratios in enumerate(zip(*block, strict=False)):
            ratio = median(ratios)
            streak = self._slight.get(rank)
            # A rank that is named keeps its streak until it is well again: near the limit it would come and go.
            is_named = streak is not None and self._named.get(rank) is streak
            if ratio > (WELL_RATIO if is_named else SLIGHT_RATIO):
                streak = self._slight.setdefault(rank, _Streak(began))
                streak.windows += 1
                streak.ratios += ratio
                if streak.windows >= SLIGHT_BLOCKS and rank not in self._running:
                    self._named[rank] = streak
            elif streak is not None:
                self._slight.pop(rank).until = now

    def named(self) -> list[Straggler]:
        """Return the nodes that were slow for long so far, ordered by rank. Each has its last such time."""
        by_host = defaultdict(list)
        for rank in sorted(self._named):
            by_host[self._host_of(rank)].append(rank)
        found = []
        for host, ranks in by_host.items():
            # A node's straggler has the ranks that are slow now, or all of them if none still is.
            still = [rank for rank in ranks if self._named[rank].until is None] or ranks
            streaks = [self._named[rank] for rank in still]
            until = max((s.until for s in streaks if s.until is not None), default=None)
            ratio = round(median(s.ratio for s in streaks), 2)
            found.append(Straggler(host, tuple(still), ratio, min(s.since for s in streaks), until))
        return found


def usual_of(own_s: Sequence[float]) -> float:
    """Return the median of all but the slowest rank. With two ranks that is the faster one.

    With many ranks it is about the median of all. A rank of 0 seconds is left out: it does no steps of its own, such
    as a parameter server.
    """
    working = sorted(seconds for seconds in own_s if seconds)
    return median(working[:-1]) if len(working) > 1 else 0.0


#: Seconds between two looks at what the job uses: the nodes are not sampled more often.
USAGE_EVERY_S = 15.0
_HEAD = ("attempt", "from step", "nodes", "why the attempt before it ended", "steps lost")


class History:
    """The attempts before this one. Rank 0 alone reads them, once, from the run's files; other ranks have none."""

    def __init__(self, session: Session, first_step: int, breakdown: TimeBreakdown) -> None:
        self._attempt, self._is_main = session.attempt, session.is_main
        self._first_step = first_step
        self._breakdown = breakdown
        run = RunDir(session.run_dir)
        self._nodes = run.status().nodes if self._is_main else ()
        self._lines = run.attempts() if self._is_main else []
        self._before = goodput.of_files(run) if self._is_main else None
        self._table_is_due = bool(self._lines)
        self._run, self._read_usage_at = run, 0.0

    def scalars(self, step: int) -> dict[str, float]:
        """Return the attempt's number, and each part's share of the time since the run's submission.

        Shares are over all attempts, not of this one alone: a curve that began anew at each restart would show least
        where most was lost.
        """
        if not self._is_main:
            return {}
        # This attempt's part is computed as if it had begun at second 0 without start-up; the others' comes from files.
        best = max((line.step_end or 0 for line in self._lines), default=0)
        spent = dict(self._breakdown.spent)
        here = goodput.of_attempt(
            AttemptStart(0.0, None, 0.0, 0.0, best),
            0.0,
            RunProgress(spent=spent, step_start=self._first_step, step=step),
            sum(spent.values()),
        )
        both = {part: here[part] + (self._before or {}).get(part, 0.0) for part in PARTS}
        wall_s = sum(both.values()) or 1.0
        shares = {f"goodput/{part}": both[part] / wall_s for part in PARTS}
        return {"run/attempt": float(self._attempt), **shares, **self._usage()}

    def _usage(self) -> dict[str, float]:
        """Return what the job uses, by the supervisor's status. Empty where there is no sample since the last call."""
        if time.monotonic() < self._read_usage_at:
            return {}
        self._read_usage_at = time.monotonic() + USAGE_EVERY_S
        try:
            return efficiency.usage_scalars(self._run.status().usage)
        except OSError:  # the disk is away, which ends no training
            return {}

    def take_table(self) -> str | None:
        """Return a Markdown table with a row for each restart, at the first call in a restarted attempt; else None."""
        if not self._table_is_due:
            return None
        self._table_is_due = False
        # A row joins the end of one attempt with the start of the next.
        starts: list[tuple[int, int | None, Sequence[str]]] = []
        starts += [(line.attempt, line.step_start, line.nodes) for line in self._lines[1:]]
        starts.append((self._attempt, self._first_step, self._nodes))
        rows: list[Sequence[str]] = [_HEAD, ("---",) * len(_HEAD)]
        for ended, (number, first, hosts) in zip(self._lines, starts, strict=True):
            # Lost are the steps that the attempt had made beyond the one that the next began with.
            lost = "" if first is None or ended.step_end is None else str(max(0, ended.step_end - first))
            why = f"{ended.cause}: {ended.line}".replace("|", r"\|").replace("\n", " ")
            rows.append((str(number), "" if first is None else str(first), hostlist.compress(hosts), why, lost))
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)
