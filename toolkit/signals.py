"""Notes the signals that ask a job to stop soon.

Slurm, a site or a person sends them. A handler runs between any two instructions of the main thread. If it saves, logs
or takes a lock, it hangs or corrupts what it interrupted. So this one only notes the signal and passes the request on
to something reentrant.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

#: Each may come more than once, to some ranks first, and in any order.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class StopSignals:
    """The handler of this process's stop signals. It keeps signals that come before there is a listener."""

    def __init__(self) -> None:
        self.first: float | None = None  #: when the first signal came, in seconds since the epoch
        self._listener: Callable[[], None] | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.first is None:
            self.first = time.time()
        if self._listener is not None:
            self._listener()

    def listen(self, listener: Callable[[], None] | None) -> None:
        """Call ``listener`` for each signal, and at once if one was noted. It must be safe in a signal handler."""
        self._listener = listener
        if listener is not None and self.first is not None:
            listener()


def install() -> StopSignals:
    """Return this process's handler, and install it if there is none. The signal table itself stores it."""
    current = signal.getsignal(signal.SIGTERM)
    if isinstance(current, StopSignals):
        return current
    handler = StopSignals()
    if threading.current_thread() is threading.main_thread():  # handlers can be set only there
        for number in STOP_SIGNALS:
            signal.signal(number, handler)
    return handler


def ignore() -> None:
    """Ignore the stop signals from now on.

    A process that has ended well must not be killed on its way out. While the interpreter shuts down it restores the
    default action, which is to die, for every handler of ours. A signal that is ignored stays ignored.
    """
    if threading.current_thread() is threading.main_thread():
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
