"""Looks for dead, drained and sick nodes while ranks work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial

from toolkit.base import hostlist, logs, outages
from toolkit.base.errors import SlurmError
from toolkit.base.process_limits import limits
from toolkit.nodes.agent.messages import LeaveOrder
from toolkit.run.attempt.attempt import Attempt
from toolkit.run.attempt.verdict import StopReason
from toolkit.run.supervise import supervisor_components
from toolkit.run.supervise.rank_stop import RankStopper
from toolkit.run.supervise.supervisor_components import Context

log = logs.get(__name__)


#: A run whose steps take longer stays on a drained or sick node: its ranks could give the stop up.
LONGEST_STEP_TO_MOVE_S = 30.0
#: A run with less time than this until it stops for the time limit stays, too: the next start comes soon anyway.
LEAST_TIME_TO_MOVE_S = 300.0


class NodeCare:
    """Watches the nodes of a job, in all its attempts."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.dead = supervisor_components.dead_node_finder(context)
        self._drained: NodePoller | None = None
        slurm = context.job.slurm
        if slurm is not None and len(context.allocation.hosts) > 1:  # a job on one node cannot leave it
            self._drained = for_drained_nodes(slurm.drain_reasons)

    def look_for_degraded(self, attempt: Attempt, stops: RankStopper) -> None:
        """Ask the ranks to stop where good spares can replace drained or sick nodes, and no step is lost by it."""
        agents, nodes = self._context.agents, self._context.nodes
        if agents is None:
            return
        drained: Mapping[str, str] = {}
        if self._drained is not None:
            self._drained.look(self._context.allocation.hosts)
            drained = self._drained.found
        slow = self._context.usage.slow_links() or {}
        nodes.note(sick={**slow, **agents.sick_hosts}, drained=drained)
        # Move only if good spares are there and the stop costs no step.
        leaving = nodes.replaceable(attempt.plan.hosts, agents.heard_hosts)
        is_ending = attempt.stop is not None or attempt.kill_at is not None or attempt.exit_code is not None
        if not leaving or is_ending or self._context.is_script:
            return
        step_s = attempt.mean_step_s
        if step_s is None or step_s > LONGEST_STEP_TO_MOVE_S:
            return
        if self._context.job.is_nearly_over(attempt.progress.save_s or 0.0, LEAST_TIME_TO_MOVE_S):
            return
        log.warning("spares are to replace %s: asking the ranks to stop", ", ".join(leaving))
        attempt.vacate(leaving)
        for host, bad in leaving.items():
            nodes.condemn(host, bad.why, is_drained=bad.is_drained)
        stops.ask(StopReason.MOVE)

    def release_drained(self, attempt: Attempt) -> None:
        """Release the drained nodes that were left from the job. Their administrator waits until no job is there."""
        job, agents = self._context.job, self._context.agents
        drained = {host for host, bad in attempt.vacated_nodes.items() if bad.is_drained}
        row = job.show() if drained else None
        if job.slurm is None or row is None or agents is None:
            return
        for host in drained:
            agents.send(host, LeaveOrder())
        keep = hostlist.compress([host for host in hostlist.expand(row.node_list) if host not in drained])
        release = partial(job.slurm.release_nodes, row.requeue_id, keep=keep)
        outages.retry_slurm(release, f"{', '.join(sorted(drained))} cannot be released", wait_s=0.0)


class NodePoller:
    """Calls ``ask`` with hosts in a thread. At most once in ``every_s``, and not while an earlier call lasts."""

    def __init__(
        self, ask: Callable[[list[str]], Mapping[str, str]], every_s: float, clock: Callable[[], float], first: float
    ) -> None:
        self._ask, self._every_s, self._clock, self._next = ask, every_s, clock, first
        self._thread: threading.Thread | None = None
        self.found: Mapping[str, str] = {}  #: the problems by host, as of the last answer

    def look(self, hosts: Collection[str]) -> None:
        """Have ``hosts`` asked about, if there are any and it is time."""
        is_asking = self._thread is not None and self._thread.is_alive()
        if hosts and not is_asking and self._clock() >= self._next:
            self._next = self._clock() + self._every_s
            self._thread = threading.Thread(target=self._find, args=[sorted(hosts)], daemon=True)
            self._thread.start()

    def _find(self, hosts: list[str]) -> None:
        try:
            self.found = self._ask(hosts)
        except SlurmError as error:  # a controller that does not answer changes nothing
            log.debug("Slurm does not report the nodes' states: %s", error)


def for_drained_nodes(
    drained: Callable[[str], Mapping[str, str]], clock: Callable[[], float] = time.monotonic
) -> NodePoller:
    """Return the poller that finds the reasons by host; ``drained`` is that of `toolkit.slurm.commands`."""
    first = clock() + limits().ask_drained_every_s  # Slurm starts no job on a drained node
    return NodePoller(lambda hosts: drained(hostlist.compress(hosts)), limits().ask_drained_every_s, clock, first)
