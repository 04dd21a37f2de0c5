"""Finds nodes that are dead, in seconds, where another node can take over."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping

from toolkit.nodes.start.launcher import NodeFailed
from toolkit.run.attempt.attempt import Attempt
from toolkit.run.supervise.context import Context
from toolkit.run.supervise.node_care import NodePoller

#: Each question is a line in the log of a node's slurmd.
ASK_EVERY_S = 1.0
#: A node is dead when it has been silent for ``DEAD_S`` longer than between two heartbeats, and longer than in any
#: silence of this job that has ended by itself. Links may be away for that long: a restart is quicker, but the node is
#: lost to the job.
DEAD_S, QUESTION_S = 2.0, 0.5
#: The same where its loss would cost more than a restart, or the fault may be elsewhere.
PATIENT_S = 6.0


class DeadNodes:
    """Asks silent nodes again and again, and puts the dead ones into the queue as NodeFailed.

    Slurm itself needs SlurmdTimeout for it, 300 s by default. Only silent nodes are asked about, and only where another
    node could take over: a network that is away for half a minute must not end a run that would be requeued for it.
    """

    def __init__(self, context: Context, clock: Callable[[], float] = time.monotonic) -> None:
        self._context, self._clock, self._longest_s = context, clock, 0.0
        self._answered: dict[str, float] = {}  #: when a host last answered a question
        self._poller = NodePoller(self.ask, ASK_EVERY_S, clock, first=0.0)

    def look(self, attempt: Attempt) -> None:
        """Have silent nodes asked about. To be called all the time, also during a kill.

        A dead node never reports the end of its ranks.
        """
        context = self._context
        if context.agents is None or context.job.slurm is None:
            return
        elsewhere = {*attempt.plan.hosts} - {context.allocation.hosts[0]}
        silent = context.agents.unsure_hosts & elsewhere - attempt.lost_nodes
        self._poller.look(context.nodes.dispensable(silent))

    def ask(self, hosts: Collection[str]) -> Mapping[str, str]:
        """Ask ``hosts`` until each has given a sign of life or is dead. Return the dead ones."""
        agents, job = self._context.agents, self._context.job
        assert agents is not None
        assert job.slurm is not None
        signs = {host: self._last_sign(host) for host in hosts}
        silent, is_connected = job.unreachable([*hosts], QUESTION_S), False
        while silent := silent & agents.unsure_hosts:
            left_s = max(map(self._last_sign, silent)) + self._patience_s(silent) - self._clock()
            # If Slurm's controller does not answer either, this node may be the one that is cut off.
            if not is_connected and not (is_connected := job.slurm.available()):
                return {}
            if left_s <= 0:
                break
            silent = job.unreachable(sorted(silent), min(left_s, QUESTION_S))
        for host in sorted(silent):
            self._context.events.put(NodeFailed(host))
        # TCP answers long before it sends again. A network that was silent for a moment will be so again, and longer.
        for host in signs.keys() - silent:
            if agents.links.last_sign(host) == math.inf:  # it was given up meanwhile
                continue
            self._answered[host] = self._clock()
            self._longest_s = max(self._longest_s, self._answered[host] - signs[host])
        return dict.fromkeys(silent, "does not answer")

    def _last_sign(self, host: str) -> float:
        agents = self._context.agents
        assert agents is not None
        return max(agents.links.last_sign(host), self._answered.get(host, 0.0))

    def _patience_s(self, silent: set[str]) -> float:
        """Return how long ``silent`` must be silent to be dead.

        Where too many are, or all, a switch or our own link may be away: the nodes come back without a requeue.
        """
        context, agents = self._context, self._context.agents
        assert agents is not None
        others = agents.heard_hosts - agents.unsure_hosts - silent - {context.allocation.hosts[0]}
        if others and context.nodes.can_lose(silent):
            return min(DEAD_S + max(agents.heartbeat_s, self._longest_s), PATIENT_S)
        return PATIENT_S
