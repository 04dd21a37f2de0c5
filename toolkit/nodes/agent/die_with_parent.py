"""``python die_with_parent.py PARENT SIGNAL HANDLING COMMAND ...``: become COMMAND, and get SIGNAL when PARENT dies.

A process that is started through this does not outlive its parent, even if the parent gets SIGKILL and cannot clean up.
It is a file of its own that imports nothing of ours: it runs under ``python -I -S`` in some 15 ms. (``preexec_fn``
would do the same between fork and exec, where a thread that holds a lock means a deadlock.)
"""

import ctypes
import os
import signal
import sys

#: Signals that a site, Slurm or a terminal sends to every process of a job.
SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
#: HANDLING: whether COMMAND ignores ``SIGNALS``.
IGNORE, DEFAULT = "ignore", "default"
PR_SET_PDEATHSIG = 1  # linux/prctl.h; survives exec, is not inherited by children


def die_with(parent: int, number: signal.Signals) -> None:
    """Have this process get ``number`` when the thread that started it dies, see PR_SET_PDEATHSIG in prctl(2)."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(number))
    if os.getppid() != parent:  # it died before the line above: no signal will come
        os._exit(1)  # also in a fork, which must not run what its parent has left for its own end


def ignore_signals() -> None:
    """Have this process ignore ``SIGNALS``: another one decides what ends."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def main() -> None:
    parent, signal_name, handling, *command = sys.argv[1:]
    die_with(int(parent), signal.Signals[signal_name])
    for number in SIGNALS:  # a submitting shell may have had some ignored
        signal.signal(number, signal.SIG_IGN if handling == IGNORE else signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: cannot be started: {error.strerror}")


if __name__ == "__main__":
    main()
