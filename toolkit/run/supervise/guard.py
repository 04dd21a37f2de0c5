"""The guard: the batch script's own process, which restarts a supervisor killed by a signal.

Slurm takes the job as over when the process that it started ends, even if others still run. So that process only waits.
A supervisor that gets SIGKILL (by the kernel for lack of memory, by someone's mistake) is replaced within the
allocation. The agents end the ranks; the next supervisor starts others, from the state in memory or on disk.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable

from toolkit.base import logs
from toolkit.base.errors import ToolkitError
from toolkit.nodes.agent import die_with_parent

#: What kills a supervisor this often in a row, with no new step in between, will kill the next one, too.
MAX_DEATHS = 3

log = logs.get(__name__)


class SupervisorKilledError(ToolkitError):
    """Supervisors were killed one after the other, and the run made no new step in between."""


def guarded(supervise: Callable[[str | None], int], step: Callable[[], int] = lambda: 0) -> int:
    """Run ``supervise(None)`` in a child process, with the stop signals blocked; return its exit code.

    When a signal kills the child, ``supervise`` runs again with a line that says so. Stop signals are passed on. If the
    child is killed after SIGTERM was passed on, the job is over and the code is 128 + the signal. Raises
    SupervisorKilledError after three deaths in a row between which ``step``, the run's highest one, did not grow.
    """
    earlier_death: str | None = None
    deaths, best = 0, step()
    try:
        while deaths < MAX_DEATHS:
            code, was_terminated = _run_child(supervise, earlier_death)
            if code >= 0:
                return code
            name = signal.Signals(-code).name
            if was_terminated:
                return 128 - code
            earlier_death = f"the supervisor on {os.uname().nodename} was killed by {name}"
            # A new step since the last death starts the count anew.
            reached = step()
            deaths, best = (1, reached) if reached > best else (deaths + 1, best)
            log.error("%s, %d times in a row without a new step", earlier_death, deaths)
    finally:  # there is no child any more to pass signals to
        for number in die_with_parent.SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, die_with_parent.SIGNALS)
    raise SupervisorKilledError(
        f"{earlier_death}, and {MAX_DEATHS - 1} others before it: is the batch host out of memory?"
    )


def _run_child(supervise: Callable[[str | None], int], earlier_death: str | None) -> tuple[int, bool]:
    """Return the exit code, negative after a signal, and whether SIGTERM was passed on."""
    passed_on: list[int] = []
    guard = os.getpid()
    # Blocked while there is no child to pass signals to: one that comes now is delivered a moment later.
    signal.pthread_sigmask(signal.SIG_BLOCK, die_with_parent.SIGNALS)
    child = os.fork()
    if child == 0:
        # Run ``supervise``, and never return: the frames above on the stack are the guard's.
        code = 1
        try:
            die_with_parent.die_with(guard, signal.SIGKILL)
            code = supervise(earlier_death)  # unblocks the signals when it has handlers: one may have come already
        finally:
            with contextlib.suppress(OSError):  # the code counts also where the last words cannot be written
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def pass_on(number: int, frame: object) -> None:
        passed_on.append(number)
        os.kill(child, number)  # not reaped before the handlers are gone, so the pid is not reused

    for number in die_with_parent.SIGNALS:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, die_with_parent.SIGNALS)
    # Wait without reaping: the pid stays the child's while signals are passed on.
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    # Signals that come from now on are for the next child, if there is one.
    signal.pthread_sigmask(signal.SIG_BLOCK, die_with_parent.SIGNALS)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), signal.SIGTERM in passed_on
