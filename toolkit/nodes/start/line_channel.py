"""Exchanges lines with processes on the nodes, through srun's own channels.

The nodes write to srun's labelled stdout, and read its stdin, which srun passes to all. So only what srun reaches
anyway has to be reachable.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

from toolkit.nodes.start.children import start_child
from toolkit.slurm.environment import step_environment
from toolkit.slurm.srun_commands import SrunStep, srun_argv

#: For a step that observes and does no work: on every CPU of the job, with the memory and GPUs that are there.
BESIDE_OTHERS = ("--cpu-bind=none", "--mem=0")


@dataclass(frozen=True)
class NodeLine:
    """One line of one node.

    ``task`` is the node's place in the list of hosts, ``received`` a time by this process's clock.
    """

    task: int
    text: str
    received: float


@dataclass(frozen=True)
class ErrorLine:
    """One line of srun's own errors."""

    text: str


@dataclass(frozen=True)
class ChannelEnded:
    """The end of the output: no more lines will come."""


Events = SimpleQueue[NodeLine | ErrorLine | ChannelEnded]


class LineChannel:
    """Exchanges lines with one process. It is srun, which passes on its tasks' lines, or a check itself."""

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str], descriptors: Sequence[int] = ()) -> None:
        self.events: Events = SimpleQueue()
        self.began = time.time()  #: on this process's clock
        self._process = start_child(
            argv,
            environ,
            end_by=signal.SIGTERM,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            pass_fds=descriptors,
        )
        # Both outputs are read at once: a full pipe would block the process.
        self._stderr = threading.Thread(target=self._read_errors, daemon=True)
        self._stderr.start()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stdout:
            for line in stdout:
                task, text = without_label(line)
                self.events.put(NodeLine(task or 0, text, time.time()))
        self._process.wait()
        self._stderr.join(timeout=1.0)
        self.events.put(ChannelEnded())

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as stderr:
            for line in stderr:
                self.events.put(ErrorLine(line.strip()))

    def send(self, line: str) -> None:
        """Send a line to every node."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended, and the queue has that event
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def end(self) -> None:
        """Dismiss the nodes, without waiting for any."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

        # srun ends when its tasks have. With a task that hangs it must be signalled, and then killed.
        def end_late() -> None:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(timeout=2.0)
                    return
                self._process.send_signal(number)

        threading.Thread(target=end_late, daemon=True).start()


def without_label(line: str) -> tuple[int | None, str]:
    """Return the task in the label of ``srun --label``, and the line. Without srun the task is None."""
    label, colon, text = line.rstrip("\n").partition(": ")
    return (int(label), text) if colon and label.strip().isdigit() else (None, line.rstrip("\n"))


def open_channel(
    command: Sequence[str], hosts: Sequence[str], environ: Mapping[str, str], gres: str | None
) -> LineChannel:
    """Start ``command`` once on each of these nodes of the job, with ``gres`` there. Its other processes go on."""
    host_file = os.memfd_create("hosts")  # not on a disk: the preflight checks whether one can be written
    try:
        os.write(host_file, "".join(f"{host}\n" for host in hosts).encode())
        variables = {**step_environment(environ), "SLURM_HOSTFILE": f"/proc/self/fd/{host_file}"}
        step = SrunStep(command, hosts, None, None, gres=gres, overlap=True, extra=[*BESIDE_OTHERS, "--label"])
        return LineChannel(srun_argv(step), variables, [host_file])
    finally:
        os.close(host_file)
