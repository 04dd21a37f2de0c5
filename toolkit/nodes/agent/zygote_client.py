"""The agent's side of the zygote, see :mod:`toolkit.nodes.agent.zygote`."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from toolkit.base import logs, proc_stat
from toolkit.nodes.agent.die_with_parent import ignore_signals
from toolkit.nodes.agent.zygote import ROOM_BYTES, ROOM_VARIABLE, ForkOrder

#: Room for what ``ps`` shows of a rank.
TITLE_BYTES = 1024
#: A zygote forks within milliseconds. While its answer is awaited the agent does nothing else.
FORK_S = 10.0
#: An import may wait for a slow file server for minutes. A zygote that is stopped (SIGSTOP) will not answer.
IMPORT_S, STOPPED_S = 900.0, 10.0

log = logs.get(__name__)


class ZygoteClient:
    """Starts a zygote, and has it fork ranks.

    ``can_fork``: it is clean. ``is_importing``: requests have to wait. ``was_ready``: it has been of use.
    ``has_torch``: torch could be imported. ``took``: how long its import has taken, and has waited for files.
    """

    def __init__(
        self,
        imports: Path | None,
        python: str = sys.executable,
        environ: Mapping[str, str] = os.environ,
        *,
        forks: str = "ranks",
    ) -> None:
        """Start a zygote that forks ranks, or only stores.

        ``python`` may be that of a copied environment, and ``environ`` name the copies.
        """
        self.is_of_a_copy = python != sys.executable
        self.took = {"import_s": 0.0, "waited_s": 0.0}
        self.socket, other = socket.socketpair()
        # Both placeholders make room for what ``ps`` and /proc show of a rank, see zygote.show().
        room = {ROOM_VARIABLE: "-" * ROOM_BYTES}
        with other:
            arguments = [str(other.fileno()), forks, str(imports or ""), "-" * TITLE_BYTES]
            self._process = subprocess.Popen(
                [python, "-P", "-m", "toolkit.nodes.agent.zygote", *arguments],
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                preexec_fn=ignore_signals,  # safe: the agent has one thread
                env={**environ, **room},
            )
        self.pid = self._process.pid
        self._lines = self.socket.makefile("rw")
        self.socket.settimeout(FORK_S)
        self.can_fork, self.is_importing, self.was_ready, self.has_ended = False, True, False, False
        self.has_torch = False
        self.has_learnt = imports is not None  #: it may have imported what the ranks did
        self._awaited_since = time.monotonic()  #: the last import
        self._stopped_since: float | None = None

    def hear(self) -> bool:
        """Take the message that the zygote has imported; return False when it has ended."""
        line, self.is_importing = "", False
        with contextlib.suppress(OSError):  # it was given up
            line = self._lines.readline()
        if not line:
            self.can_fork, self.has_ended = False, True
            log.warning("the zygote has ended: ranks start as fresh interpreters")
            return False
        ready = json.loads(line)["ready"]
        is_first, self.was_ready = not self.was_ready, True
        self.has_torch = ready["has_torch"]
        if is_first:
            self.took = {name: ready[name] for name in self.took}
        self.can_fork = ready["unclean"] is None
        # Before the first answer the zygote counts as one that has learnt: a learnt module may be what ended it.
        self.has_learnt = ready["learnt"] > 0 or (self.has_learnt and not is_first)
        if not self.can_fork:
            log.warning("ranks start as fresh interpreters: %s", ready["unclean"])
        elif is_first:
            log.info("ranks are forked from a process that has imported torch in %.1f s", ready["import_s"])
        elif ready["learnt"]:
            log.info("imported %d modules more that ranks import, in %.1f s", ready["learnt"], ready["import_s"])
        return True

    def learn(self) -> None:
        """Have the zygote import what ranks have imported since they were forked."""
        with contextlib.suppress(OSError):  # its end is noticed by hear()
            self._lines.write("{}\n")
            self._lines.flush()
            self.is_importing, self._awaited_since = True, time.monotonic()

    def end_if_silent(self) -> None:
        """Kill a zygote that imports for too long, or is stopped. Its end is noticed by :meth:`hear`."""
        now, stat = time.monotonic(), proc_stat.read(self.pid)
        is_stopped = stat is not None and stat.state in "Tt"
        self._stopped_since = (self._stopped_since or now) if is_stopped else None
        is_late = self.is_importing and now - self._awaited_since > IMPORT_S
        if is_late or (self._stopped_since is not None and now - self._stopped_since > STOPPED_S):
            log.warning("the zygote is %s: it is killed", "stopped" if is_stopped else "still importing")
            self.end()

    def fork(self, order: ForkOrder) -> int | None:
        """Return the pid of a new rank, our child. Raises OSError for bad files.

        None if the zygote has died, or has not answered in time and was killed.
        """
        line = ""
        try:
            self._lines.write(json.dumps(order) + "\n")
            self._lines.flush()
            line = self._lines.readline()
        except TimeoutError:
            log.warning("the zygote has not forked a rank within %.0f s: it is killed", FORK_S)
            self.end()
        except OSError:  # it has died
            pass
        if not line:
            self.can_fork = False
            return None
        answer = json.loads(line)
        if "error" in answer:
            raise OSError(answer["error"])
        return int(answer["pid"])

    def end(self) -> None:
        """Kill the zygote."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
