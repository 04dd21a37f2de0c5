"""Reacts to nodes that die, or that are drained or sick, while ranks work on them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from toolkit import hostlist, logs
from toolkit.launch import outages
from toolkit.launch.supervise.attempt import Attempt
from toolkit.launch.supervise.context import Context
from toolkit.launch.supervise.facts import Stop
from toolkit.launch.supervise.stop_path import StopPath
from toolkit.launch.watch.node_states import NodePoller, for_dead_nodes, for_drained_nodes

#: A run whose steps take longer stays on a drained or sick node: its ranks could give the stop up.
LONGEST_STEP_TO_MOVE_S = 30.0
#: A run with less time than this until it stops for the time limit stays, too: the next start comes soon anyway.
LEAST_TIME_TO_MOVE_S = 300.0

log = logs.get(__name__)


class NodeCare:
    """Watches the nodes of a job, in all its attempts."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._dead: NodePoller | None = None
        self._drained: NodePoller | None = None
        slurm = context.job.slurm
        if slurm is not None:
            self._dead = for_dead_nodes(context.events, slurm.available, context.job.unreachable)
            if len(context.allocation.hosts) > 1:  # a job on one node cannot leave it
                self._drained = for_drained_nodes(slurm.drained)

    def look_for_dead(self, attempt: Attempt) -> None:
        """Look for dead nodes where another node could take over. Else Slurm requeues the job, and a
        network recovers."""
        context = self._context
        if self._dead is None or context.agents is None or not context.nodes.can_lose_one:
            return
        # Also during a kill: a dead node never reports the end of its ranks.
        elsewhere = {*attempt.plan.hosts} - {context.allocation.hosts[0]}
        self._dead.look(context.agents.silent_hosts & elsewhere - attempt.lost_nodes)

    def look_for_ailing(self, attempt: Attempt, stops: StopPath) -> None:
        """Ask the ranks to stop where good spares can replace drained or sick nodes. No step is lost by it."""
        agents, nodes = self._context.agents, self._context.nodes
        if agents is None:
            return
        drained: Mapping[str, str] = {}
        if self._drained is not None:
            self._drained.look(self._context.allocation.hosts)
            drained = self._drained.found
        nodes.note(sick={**self._context.usage.slow_links, **agents.sick_hosts}, drained=drained)
        # Move only if good spares are there and the stop costs no step.
        leaving = nodes.to_leave(attempt.plan.hosts, agents.heard_hosts)
        is_ending = attempt.stop is not None or attempt.kill_at is not None or attempt.exit_code is not None
        if not leaving or is_ending or self._context.is_foreign:
            return
        step_s = attempt.mean_step_s
        if step_s is None or step_s > LONGEST_STEP_TO_MOVE_S:
            return
        # A job that ends soon goes on elsewhere anyway.
        if self._context.job.is_nearly_over(attempt.save_s, LEAST_TIME_TO_MOVE_S):
            return
        log.warning("spares are to replace %s: asking the ranks to stop", ", ".join(leaving))
        attempt.vacated_nodes = leaving
        for host, bad in leaving.items():
            nodes.condemn(host, bad.why, is_drained=bad.is_drained)
        stops.ask(Stop.MOVE)

    def give_back(self, attempt: Attempt) -> None:
        """Give the drained nodes that were left back to Slurm. Their administrator waits until no job is there."""
        job, agents = self._context.job, self._context.agents
        drained = {host for host, bad in attempt.vacated_nodes.items() if bad.is_drained}
        row = job.show() if drained else None
        if job.slurm is None or row is None or agents is None:
            return
        for host in drained:
            agents.dismiss(host)
        keep = hostlist.compress([host for host in hostlist.expand(row.node_list) if host not in drained])
        give_back = partial(job.slurm.release_nodes, row.requeue_id, keep=keep)
        outages.ask(give_back, f"{', '.join(sorted(drained))} cannot be given back", wait_s=0.0)
