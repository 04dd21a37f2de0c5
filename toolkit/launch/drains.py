"""Asking Slurm which nodes of the job an administrator has drained while it runs there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping

from toolkit import logs
from toolkit.cluster import hostlist
from toolkit.errors import SlurmError

#: The controller answers with every node of the cluster, so one question is asked for the whole job, and not often.
ASK_EVERY_S = 60.0

log = logs.get(__name__)


class DrainWatch:
    """Knows which nodes are drained, by one question a minute in the background.

    ``ask`` is :meth:`SlurmCommands.drained`. A controller that does not answer changes nothing.
    """

    def __init__(self, ask: Callable[[str], Mapping[str, str]], clock: Callable[[], float] = time.monotonic) -> None:
        self._ask, self._clock = ask, clock
        self._next = clock() + ASK_EVERY_S  # Slurm starts no job on a drained node
        self._thread: threading.Thread | None = None
        self.drained: Mapping[str, str] = {}  #: the reason by host

    def look(self, hosts: Collection[str]) -> None:
        """Have Slurm asked about ``hosts``, unless it is being asked or has been within ``ASK_EVERY_S``."""
        is_asking = self._thread is not None and self._thread.is_alive()
        if is_asking or self._clock() < self._next:
            return
        self._next = self._clock() + ASK_EVERY_S
        self._thread = threading.Thread(target=self._ask_slurm, args=[sorted(hosts)], daemon=True)
        self._thread.start()

    def _ask_slurm(self, hosts: list[str]) -> None:
        try:
            self.drained = self._ask(hostlist.compress(hosts))
        except SlurmError as error:
            log.debug("Slurm does not say which nodes are drained: %s", error)
