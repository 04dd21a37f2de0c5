"""The supervisor's side of the store host: bind, listen, start the child, and read what the ranks report."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit import logs
from toolkit.errors import EXIT_FAILED
from toolkit.launch.steps import Events, open_log, tethered

LAST_WORDS_S = 3.0

log = logs.get(__name__)


@dataclass(frozen=True)
class Report:
    """One JSON line of the store host."""

    content: Mapping[str, Any]


@dataclass(frozen=True)
class StoreHostEnded:
    """The store host ended by itself, which it must not."""

    exit_code: int


class StoreHost:
    """The child that serves an attempt's store; what the ranks report goes into the queue as :class:`Report`."""

    def __init__(self, world_size: int, host: str, environ: Mapping[str, str], events: Events, log_path: Path) -> None:
        listener = listen(host)
        listener.set_inheritable(True)
        self.port: int = listener.getsockname()[1]
        command = [sys.executable, "-P", "-m", "toolkit.dist.store_host", "--fd", str(listener.fileno())]
        command += ["--port", str(self.port), "--world-size", str(world_size)]
        with listener, open_log(log_path) as output:
            self._process = subprocess.Popen(
                tethered(command, signal.SIGKILL, deaf=True),  # the ranks need it to agree on where to stop
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                pass_fds=[listener.fileno()],
                start_new_session=True,
            )
        self._events = events
        self._closing = False
        self._is_ready = False
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                content = json.loads(line)
                self._is_ready = self._is_ready or "ready" in content
                self._events.put(Report(content))
            except ValueError:  # a library that prints: the next line is ours again
                log.warning("the store host says: %s", line.rstrip())
        code = self._process.wait()
        if not self._closing:
            self._events.put(StoreHostEnded(code or EXIT_FAILED))

    def propose(self, kind: str, by: str) -> None:
        """Have the ranks agree on a step for ``kind``."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which the queue tells
            self._process.stdin.write(json.dumps({"propose": kind, "by": by}) + "\n")
            self._process.stdin.flush()

    def close(self) -> None:
        """Let it say its last words, which are in the queue when this returns, and end it.

        While it still imports torch no rank can have told it anything, and a job that is being cancelled has but
        KillWait to write down how it ended.
        """
        self._closing = True
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        if self._is_ready:
            self._thread.join(timeout=LAST_WORDS_S)
        self._process.kill()
        self._process.wait()


def wildcard() -> str:
    """The address that stands for all of this node's."""
    return "::" if socket.has_dualstack_ipv6() else "0.0.0.0"


def listen(host: str) -> socket.socket:
    """A listening socket on a free port: bound before the ranks start, so that no other job can take the port."""
    family = socket.AF_INET6 if host == "::" else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=4096, dualstack_ipv6=family == socket.AF_INET6)
