"""Watches one attempt for hangs, and ends the ranks of one that hangs."""

from __future__ import annotations

import time

from toolkit.base import logs
from toolkit.hang.watchdog import Watchdog
from toolkit.nodes.agent.reports import Digest
from toolkit.nodes.start.launcher import RunningRanks
from toolkit.run.attempt.attempt import Attempt
from toolkit.run.attempt.facts import RankFailure, Stop
from toolkit.run.supervise import parts
from toolkit.run.supervise.context import Context

log = logs.get(__name__)


class HangWatch:
    """Watches by the ranks' reports. Where they report nothing, they are watched from outside."""

    def __init__(self, context: Context, attempt: Attempt, ranks: RunningRanks) -> None:
        self._context, self._attempt = context, attempt
        self._investigation = parts.investigating_hangs(context, attempt, ranks)
        self._reports: Watchdog | None = None
        if not context.is_foreign:
            self._reports = Watchdog(context.config.dist.timeout_s)

    @property
    def hears_ranks(self) -> bool:
        """True where ranks are to report.

        The toolkit's own are, and those of a script that has called ``toolkit.start()``.
        """
        return self._reports is not None

    def hear(self, host: str, digest: Digest) -> None:
        """Take the progress of the ranks on ``host``."""
        if self._reports is None:
            self._reports = Watchdog(self._context.config.dist.timeout_s)
        self._reports.hear(host, digest)

    def look(self) -> None:
        """Kill the ranks if they hang.

        Ranks end a stop that hangs by themselves (``FORCE_AFTER_S`` of `toolkit.ranks.session`), and ranks that are
        being killed need no other reason.
        """
        attempt, agents = self._attempt, self._context.agents
        if attempt.stop not in (None, Stop.MOVE) or attempt.kill_at is not None:
            return
        reports = self._reports
        if not (self._investigation.is_stuck() if reports is None else reports.is_stuck()):
            return
        # Only of ranks that are stuck: of others it is not known how long they have been still.
        still_s = self._investigation.still_s() if reports is None else reports.still_s
        if still_s is None:  # the investigation has failed
            return
        how = f"no progress for {still_s:.0f} s, dist.timeout_s is {self._context.config.dist.timeout_s}"
        # Ask before the kill, which destroys the evidence.
        if agents is not None:
            agents.ask_for_unanswered()
        log.error("%s: %s", how, "asking the ranks for their stacks" if self._investigation else "the run hangs")
        found: RankFailure | None = self._investigation.find_cause(self._reports)
        attempt.end_for_hang(found or RankFailure(None, "", how, time.time()))

    def answer_with_stacks(self, request_id: str) -> None:
        """Answer `toolkit stacks`. Does not wait for the stacks."""
        self._investigation.answer(request_id, self._reports)

    def close(self) -> None:
        """End the watch."""
        self._investigation.close()
