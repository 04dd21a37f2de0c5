"""The signals by which Slurm, a site or a person asks a job to stop soon, noted in a way that a handler may.

A handler runs between any two instructions of the main thread. One that saves, logs or takes a lock hangs or corrupts
what it interrupted, so this one only notes the signal and passes the request on to something reentrant.
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
    """The handler of the stop signals of this process. Signals that come before anybody listens are kept."""

    def __init__(self) -> None:
        self.first: float | None = None  #: when the first one came, in seconds since the epoch
        self._listener: Callable[[], None] | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.first is None:
            self.first = time.time()
        if self._listener is not None:
            self._listener()

    def listen(self, listener: Callable[[], None] | None) -> None:
        """Call ``listener``, which must be safe in a signal handler, for each signal, and at once for one noted."""
        self._listener = listener
        if listener is not None and self.first is not None:
            listener()


def install() -> StopSignals:
    """This process's handler, installed now if it is not yet. The signal table itself is where it is kept."""
    current = signal.getsignal(signal.SIGTERM)
    if isinstance(current, StopSignals):
        return current
    handler = StopSignals()
    if threading.current_thread() is threading.main_thread():  # only there can handlers be set
        for number in STOP_SIGNALS:
            signal.signal(number, handler)
    return handler


def ignore() -> None:
    """From now on: what has ended well must not be killed on its way out.

    While the interpreter shuts down it puts back the default action of every handler of ours, which is to die; what is
    ignored stays ignored.
    """
    if threading.current_thread() is threading.main_thread():
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
