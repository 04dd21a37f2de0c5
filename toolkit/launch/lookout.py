"""Finding dead nodes in seconds: a node whose ranks say nothing is asked whether it is still there.

Slurm itself gives a node up after SlurmdTimeout, 300 s by default, and srun tells us later still. Only nodes that are
silent are asked, since each question is a line in the log of their slurmd, and only where another node could take over:
a network that is away for half a minute does not end a run that would be requeued for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence

from toolkit.launch.steps import Events, NodeFailed

ASK_EVERY_S = 5.0
#: So many questions in a row without an answer.
QUESTIONS = 2


class Lookout:
    """One attempt's.

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
        self._unanswered: dict[str, int] = {}
        self._thread: threading.Thread | None = None

    @property
    def is_due(self) -> bool:
        """Whether the next questions may be asked; who the silent nodes are need not be found out before."""
        return self._clock() >= self._next and not (self._thread is not None and self._thread.is_alive())

    def look(self, silent: Collection[str]) -> None:
        """Have ``silent`` nodes asked, in the background; a dead one arrives in the queue as NodeFailed."""
        if not silent or not self.is_due:
            return
        self._next = self._clock() + ASK_EVERY_S
        self._thread = threading.Thread(target=self._ask, args=[frozenset(silent)], daemon=True)
        self._thread.start()

    def _ask(self, silent: frozenset[str]) -> None:
        missing = self._ask_nodes(sorted(silent))
        if missing and not self._is_connected():
            return
        self._unanswered = {host: self._unanswered.get(host, 0) + 1 for host in missing}
        for host in sorted(missing):
            if self._unanswered[host] == QUESTIONS:
                self._events.put(NodeFailed(host))
