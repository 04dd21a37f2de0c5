"""What TensorBoard shows of a run's attempts.

It shows which attempt made each step, where the time went, and the cost of restarts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypeAlias

from toolkit.base import hostlist
from toolkit.files.run_files import AttemptRecord, RunProgress, Start
from toolkit.files.rundir import RunDir
from toolkit.metrics import goodput
from toolkit.metrics.goodput import PARTS, Timesheet
from toolkit.plugins.node_watch import efficiency
from toolkit.ranks.session import Session

#: Seconds between two looks at what the job uses: the nodes are not sampled more often.
USAGE_EVERY_S = 15.0
_HEAD = ("attempt", "from step", "nodes", "why the attempt before it ended", "steps lost")


class History:
    """The attempts before this one.

    Rank 0 alone reads them, once, from the run's own files; other ranks have none.
    """

    def __init__(self, session: Session, first_step: int, sheet: Timesheet) -> None:
        self._attempt, self._is_main = session.attempt, session.is_main
        self._first_step = first_step
        self._sheet = sheet
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
        spent = dict(self._sheet.spent)
        here = goodput.of_attempt(
            Start(0.0, None, 0.0, 0.0, best),
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
            return efficiency.curves(self._run.status().usage)
        except OSError:  # the disk is away, which ends no training
            return {}

    def take_table(self) -> str | None:
        """Return a Markdown table with a row for each restart, or None.

        The table comes at the first call in an attempt that is a restart. Other calls return None.
        """
        if not self._table_is_due:
            return None
        self._table_is_due = False
        # A row joins the end of one attempt with the start of the next.
        starts: list[_BeginOfAttempt] = [(line.attempt, line.step_start, line.nodes) for line in self._lines[1:]]
        starts.append((self._attempt, self._first_step, self._nodes))
        rows = [_HEAD, ("---",) * len(_HEAD), *map(_row, self._lines, starts)]
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)


#: Number, first step and nodes.
_BeginOfAttempt: TypeAlias = tuple[int, int | None, Sequence[str]]


def _row(ended: AttemptRecord, begin: _BeginOfAttempt) -> Sequence[str]:
    # Lost are the steps that the attempt had made beyond the one that the next began with.
    (number, first, hosts), last = begin, ended.step_end
    lost = "" if first is None or last is None else str(max(0, last - first))
    why = f"{ended.cause}: {ended.line}".replace("|", r"\|").replace("\n", " ")
    return (str(number), "" if first is None else str(first), hostlist.compress(hosts), why, lost)
