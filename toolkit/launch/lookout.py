"""Finding dead nodes in seconds: one whose agent is silent is asked whether it is still there.

Slurm itself gives a node up after SlurmdTimeout, 300 s by default. Only silent nodes are asked, since each question is
a line in the log of their slurmd, and only where another node could take over: a network that is away for half a minute
does not end a run that would be requeued for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence

from toolkit.launch.steps import Events, NodeFailed

ASK_EVERY_S = 3.0


class Lookout:
    """Puts dead nodes into the queue as NodeFailed.

    ``is_connected`` says whether Slurm's controller answers: if not, it may be us who are cut off. ``ask`` gives those
    of its hosts that do not answer, and may take seconds to find out.
    """

    def __init__(
        self,
        events: Events,
        is_connected: Callable[[], bool],
        ask: Callable[[Sequence[str]], set[str]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._events = events
        self._is_connected = is_connected
        self._ask_nodes = ask
        self._clock = clock
        self._next = 0.0
        self._thread: threading.Thread | None = None

    def look(self, silent: Collection[str]) -> None:
        """Have ``silent`` nodes asked, in the background, unless they are being asked or have just been."""
        is_asking = self._thread is not None and self._thread.is_alive()
        if not silent or is_asking or self._clock() < self._next:
            return
        self._next = self._clock() + ASK_EVERY_S
        self._thread = threading.Thread(target=self._ask, args=[sorted(silent)], daemon=True)
        self._thread.start()

    def _ask(self, silent: Sequence[str]) -> None:
        missing = self._ask_nodes(silent)
        if missing and self._is_connected():
            for host in sorted(missing):
                self._events.put(NodeFailed(host))
