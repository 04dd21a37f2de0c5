"""The agent's side of the zygote, see :mod:`toolkit.agent.zygote`."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from toolkit import logs
from toolkit.agent.die_with_parent import ignore_signals
from toolkit.agent.zygote import ROOM_BYTES, ROOM_VARIABLE, ForkOrder

#: Room for what ``ps`` shows of a rank.
TITLE_BYTES = 1024

log = logs.get(__name__)


class ZygoteClient:
    """Starts a zygote, and has it fork ranks.

    ``can_fork``: it is clean. ``is_importing``: requests have to wait. ``was_ready``: it has been of use. ``took``: how
    long its import has taken, and has waited for files.
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
                [python, "-P", "-m", "toolkit.agent.zygote", *arguments],
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                preexec_fn=ignore_signals,  # safe: the agent has one thread
                env={**environ, **room},
            )
        self.pid = self._process.pid
        self._lines = self.socket.makefile("rw")
        self.can_fork, self.is_importing, self.was_ready, self.has_ended = False, True, False, False
        self.has_learnt = imports is not None  #: it may have imported what the ranks did

    def hear(self) -> bool:
        """Take the message that the zygote has imported; return False when it has ended."""
        line, self.is_importing = self._lines.readline(), False
        if not line:
            self.can_fork, self.has_ended = False, True
            log.warning("the zygote has ended: ranks start as fresh interpreters")
            return False
        ready = json.loads(line)["ready"]
        is_first, self.was_ready = not self.was_ready, True
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
            self.is_importing = True

    def fork(self, order: ForkOrder) -> int | None:
        """Return the pid of a new rank, our child; None if the zygote has died. Raises OSError for bad files."""
        line = ""
        with contextlib.suppress(OSError):
            self._lines.write(json.dumps(order) + "\n")
            self._lines.flush()
            line = self._lines.readline()
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
