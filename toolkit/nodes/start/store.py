"""The supervisor's side of the store host. It binds, listens, starts the child, and sends it requests for the ranks."""

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

from toolkit.base import logs, open_files
from toolkit.base.errors import EXIT_FAILED, RequestError
from toolkit.nodes.start.children import open_log, start_child
from toolkit.nodes.start.launcher import Events
from toolkit.slurm.container import Container
from toolkit.slurm.environment import step_environment
from toolkit.slurm.network import listen
from toolkit.slurm.srun_commands import srun_here_argv

#: A rank's connections to the store: the process group's and, with NCCL, a clone of it; the gate's watcher; requests;
#: saves; and in a user's loop the thread that tells other ranks where this one is.
CONNECTIONS_A_RANK = 6
#: The files that the store host has open beside its connections.
OTHER_FILES = 64

log = logs.get(__name__)


@dataclass(frozen=True)
class StoreHostEnded:
    """The store host ended by itself, which it must not."""

    exit_code: int
    out_of_memory: bool = False


class StoreHost:
    """The child that serves an attempt's store: a :class:`~toolkit.nodes.start.launcher.Store`."""

    def __init__(
        self,
        world_size: int,
        host: str,
        environ: Mapping[str, str],
        events: Events,
        log_path: Path,
        container: Container | None = None,
    ) -> None:
        """Listen on the address ``host``. In ``container``, if any: RequestError where the store does not start there.

        The socket is bound before the ranks start, so that no other job can take the port.
        """
        module = ["toolkit.ranks.store_host", "--world-size", str(world_size), "--host", host]
        self._events = events
        self._closing = False
        self._is_a_step = container is not None and container.is_a_step
        # A container that is an srun step cannot inherit a socket.
        if container is not None and container.is_a_step:
            command = srun_here_argv([*container.srun_options(), *container.command(module)])
            self._process = _start(command, step_environment(environ), log_path, signal.SIGTERM)
            # The store chooses its port, since srun passes no socket on.
            assert self._process.stdout is not None
            port = next((port for line in self._process.stdout if (port := port_in(line)) is not None), None)
            if port is None:
                raise RequestError(f"the store host did not start in the container: {log_path} says why")
            self.port = port
        else:
            with listen(host) as listener:
                listener.set_inheritable(True)
                self.port = listener.getsockname()[1]
                module += ["--fd", str(listener.fileno())]
                command = container.command(module) if container else [sys.executable, "-P", "-m", *module]
                self._process = _start(command, environ, log_path, signal.SIGKILL, listener.fileno())
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stdout:
            for line in stdout:
                port_in(line)
        code = self._process.wait()
        if not self._closing:
            self._events.put(StoreHostEnded(code or EXIT_FAILED))

    def propose(self, kind: str, by: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, and the queue has that event
            self._process.stdin.write(json.dumps({"propose": kind, "by": by}) + "\n")
            self._process.stdin.flush()

    def close(self) -> None:
        self._closing = True
        self._process.send_signal(signal.SIGTERM if self._is_a_step else signal.SIGKILL)  # srun then ends its step
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()


def port_in(line: str) -> int | None:
    """Return the port that a store host has printed. None for a library's output, which goes into the log."""
    try:
        return int(json.loads(line)["port"])
    except (ValueError, TypeError, KeyError):
        log.warning("the store host says: %s", line.rstrip())
        return None


def _start(
    command: list[str], environ: Mapping[str, str], log_path: Path, end_by: signal.Signals, *fds: int
) -> subprocess.Popen[str]:
    with open_log(log_path) as output:
        return start_child(
            command,
            environ,
            end_by=end_by,
            ignore_signals=True,  # the ranks need the store to agree on where to stop
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            errors="replace",
            pass_fds=fds,
        )


def refuse_too_many_ranks(world_size: int) -> None:
    """Raise RequestError for more ranks than a store host on this node can serve.

    Each connection of a rank is an open file of the store host.
    """
    needed, limit = CONNECTIONS_A_RANK * world_size + OTHER_FILES, open_files.hard_limit()
    if needed > limit:
        raise RequestError(
            f"{world_size} ranks need {needed} open files on {socket.gethostname()}, where their store is "
            f"({CONNECTIONS_A_RANK} connections each), and its hard limit is {limit}: raise it (`ulimit -Hn`; "
            f"LimitNOFILE of slurmd), or run at most {(limit - OTHER_FILES) // CONNECTIONS_A_RANK} ranks"
        )
