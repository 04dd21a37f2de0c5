"""Watches one attempt for hangs. In a hang the ranks write their stacks and are killed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from toolkit.base import logs
from toolkit.hang import silence, stacks
from toolkit.hang.silence import SilenceWatch
from toolkit.hang.stack_digest import RankGroup
from toolkit.hang.watchdog import STUCK_SHARE, Watchdog
from toolkit.nodes.agent import progress
from toolkit.nodes.agent.progress import Digest, Standing
from toolkit.nodes.start.launcher import RunningRanks
from toolkit.run.attempt.attempt import Attempt
from toolkit.run.attempt.facts import Stop
from toolkit.run.supervise import hang_investigation
from toolkit.run.supervise.context import Context

log = logs.get(__name__)


class HangWatch:
    """Watches by the ranks' reports, or from outside where they report nothing."""

    def __init__(self, context: Context, attempt: Attempt, ranks: RunningRanks) -> None:
        self._context, self._attempt, self._ranks = context, attempt, ranks
        self._silence: SilenceWatch | None = None
        self._reports: Watchdog | None = None
        self._has_old_stacks = False  #: the ranks have written stacks before
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
        """Kill the ranks if they hang, and find out which of them is to blame.

        Ranks end a stop that hangs by themselves (FORCE_AFTER_S), and ranks that are being killed need no other reason.
        """
        attempt, agents = self._attempt, self._context.agents
        if attempt.stop not in (None, Stop.MOVE) or attempt.kill_at is not None:
            return
        watch = self._reports or self._watch_from_outside()
        if watch is None or not watch.is_stuck():
            return
        timeout_s = self._context.config.dist.timeout_s
        log.error(
            "no progress for %.0f s, dist.timeout_s is %d: asking the ranks for their stacks", watch.still_s, timeout_s
        )
        # Ask before the kill, which destroys the evidence.
        assert agents is not None
        agents.ask_for_unanswered()
        known: Mapping[str, Digest] = {}
        if isinstance(watch, SilenceWatch):
            ranks = self._by_host(watch.standings())
            watch.ask_for_stacks()
        else:
            # Ranks that report write their stacks on a signal.
            known = watch.nodes
            log.info("all ranks together: %s", progress.merge(known.values()))
            world_size = attempt.plan.world_size
            ranks = self._by_host([Standing(rank, None, None, watch.still_s, False) for rank in range(world_size)])
            self._have_stacks_written(ranks)
        groups = hang_investigation.look(agents, self._context.run, attempt.number, ranks, known)
        attempt.hang = hang_investigation.investigate(groups, attempt.rank_hosts, self._context.run, attempt.number)
        attempt.kill_at = time.monotonic()

    def read_stacks(self) -> list[RankGroup]:
        """Return what the ranks do now, with their stacks. It does not disturb them. Any thread may call it."""
        attempt, agents = self._attempt, self._context.agents
        assert agents is not None
        reports = self._reports
        phase = None if reports is not None else "running"
        ranks = self._by_host([Standing(rank, phase, None, 0.0, False) for rank in range(attempt.plan.world_size)])
        if reports is not None:
            self._have_stacks_written(ranks)
        known = {} if reports is None else reports.nodes
        how = {"whole": True, "outside": reports is None}
        return hang_investigation.look(agents, self._context.run, attempt.number, ranks, known, **how)

    def _have_stacks_written(self, ranks: Mapping[str, Sequence[Standing]]) -> None:
        """Have ranks that report write their stacks. Old ones are removed before, or they would pass for new."""
        if self._has_old_stacks and self._context.agents is not None:
            hang_investigation.remove_old(self._context.agents, self._context.run, self._attempt.number, ranks)
        self._has_old_stacks = True
        self._ranks.kill(stacks.ASK)

    def _by_host(self, standings: Sequence[Standing]) -> dict[str, list[Standing]]:
        by_host: dict[str, list[Standing]] = {}
        for standing in standings:
            if standing.rank not in self._attempt.gone:  # it cannot answer, and would be taken for stopped
                by_host.setdefault(self._attempt.host_of(standing.rank), []).append(standing)
        return by_host

    def _watch_from_outside(self) -> SilenceWatch | None:
        """Return the watch of a script without reports. It is None until the script has had time to report."""
        attempt, context = self._attempt, self._context
        bound_s = STUCK_SHARE * context.config.dist.timeout_s
        late = time.time() - attempt.started > silence.START_AFTER_SHARE * bound_s
        if self._silence is None and late:
            environ = context.rank_environ(attempt.number)
            self._silence = silence.start_watch(context.run, attempt.number, attempt.plan, environ, bound_s)
        return self._silence

    def close(self) -> None:
        """End the watch from outside.

        In an attempt that failed it names the silent ranks: others may have waited for them, in NCCL until it gave up.
        """
        if self._silence is None:
            return
        silent = self._silence.standings()
        if silent and self._attempt.failures and self._attempt.hang is None:
            still_s = min(standing.still_s for standing in silent)
            names = ",".join(str(standing.rank) for standing in silent)
            log.warning("silent for %.0f s or longer before: rank %s", still_s, names)
        self._silence.close()
