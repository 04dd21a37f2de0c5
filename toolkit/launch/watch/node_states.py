"""Looks, in the background, for nodes that are dead or that an administrator has drained."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from toolkit import hostlist, logs
from toolkit.errors import SlurmError
from toolkit.launch.start.launcher import Events, NodeFailed

#: Each question is a line in the log of a node's slurmd.
ASK_DEAD_EVERY_S = 3.0
#: The controller answers with every node of the cluster, so one question is asked for the whole job, and rarely.
ASK_DRAINED_EVERY_S = 60.0

log = logs.get(__name__)


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
            log.debug("Slurm does not say how the nodes are: %s", error)


def for_dead_nodes(
    events: Events,
    is_connected: Callable[[], bool],
    unreachable: Callable[[Sequence[str]], set[str]],
    clock: Callable[[], float] = time.monotonic,
) -> NodePoller:
    """Return the poller that puts dead nodes into the queue as NodeFailed.

    Slurm itself needs SlurmdTimeout for it, 300 s by default. Ask only about silent nodes, and only where another node
    could take over: a network that is away for half a minute must not end a run that would be requeued for it.
    ``is_connected`` tells whether Slurm's controller answers: if not, this node may be the one that is cut off.
    ``unreachable`` returns the nodes that do not answer; it may take seconds.
    """

    def ask(hosts: list[str]) -> Mapping[str, str]:
        missing = unreachable(hosts)
        dead = sorted(missing) if missing and is_connected() else []
        for host in dead:
            events.put(NodeFailed(host))
        return dict.fromkeys(dead, "does not answer")

    return NodePoller(ask, ASK_DEAD_EVERY_S, clock, first=0.0)


def for_drained_nodes(
    drained: Callable[[str], Mapping[str, str]], clock: Callable[[], float] = time.monotonic
) -> NodePoller:
    """Return the poller that finds the reasons by host; ``drained`` is :meth:`SlurmCommands.drained`."""
    first = clock() + ASK_DRAINED_EVERY_S  # Slurm starts no job on a drained node
    return NodePoller(lambda hosts: drained(hostlist.compress(hosts)), ASK_DRAINED_EVERY_S, clock, first)
