"""Watches one attempt for hangs, and ends the ranks of one that hangs. A plugin finds out which rank is to blame."""

from __future__ import annotations

import time
from typing import Protocol

from toolkit import registry
from toolkit.base import logs
from toolkit.hang.watchdog import Watchdog
from toolkit.nodes.agent.reports import Digest
from toolkit.nodes.start.launcher import RunningRanks
from toolkit.run.attempt.attempt import Attempt
from toolkit.run.attempt.facts import RankFailure, Stop
from toolkit.run.supervise.context import Context

log = logs.get(__name__)


class HangInvestigator(Protocol):
    """The hook ``investigate_hangs``: made for each attempt, with the supervisor's context, the attempt and its ranks.

    ``reports`` are what the ranks have reported, None of a script that reports nothing.
    """

    def is_stuck(self) -> bool:
        """True if a script that reports nothing hangs. Called twice a second."""

    @property
    def still_s(self) -> float:
        """Return for how long its ranks have been silent."""

    def find_cause(self, reports: Watchdog | None) -> RankFailure:
        """Return which rank of a run that hangs the others wait for. The ranks are killed then."""

    def answer(self, request_id: str, reports: Watchdog | None) -> None:
        """Answer a user's request for the ranks' stacks. Does not wait for them."""

    def close(self) -> None:
        """End the watch: the ranks have ended."""


class HangWatch:
    """Watches by the ranks' reports. Where they report nothing, a plugin watches them from outside."""

    def __init__(self, context: Context, attempt: Attempt, ranks: RunningRanks) -> None:
        self._context, self._attempt = context, attempt
        self._investigator = registry.Guarded("investigate_hangs", context, attempt, ranks)  #: a HangInvestigator
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
        if not (self._investigator.ask("is_stuck") if reports is None else reports.is_stuck()):
            return
        # Only of ranks that are stuck: of others it is not known how long they have been still.
        still_s = self._investigator.ask("still_s") if reports is None else reports.still_s
        if still_s is None:  # the plugin has failed
            return
        how = f"no progress for {still_s:.0f} s, dist.timeout_s is {self._context.config.dist.timeout_s}"
        # Ask before the kill, which destroys the evidence.
        if agents is not None:
            agents.ask_for_unanswered()
        log.error("%s: %s", how, "asking the ranks for their stacks" if self._investigator else "the run hangs")
        found = self._investigator.ask("find_cause", self._reports)
        attempt.end_for_hang(found or RankFailure(None, "", how, time.time()))

    def answer_with_stacks(self, request_id: str) -> None:
        """Answer `toolkit stacks`, a command of the plugin that reads them."""
        self._investigator.ask("answer", request_id, self._reports)

    def close(self) -> None:
        """End the watch."""
        self._investigator.ask("close")
