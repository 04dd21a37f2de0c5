"""One srun of the job, and what its lines say about its tasks."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from toolkit.base import fsio, hostlist, logs
from toolkit.base.process_limits import limits
from toolkit.nodes.start.children import start_child
from toolkit.nodes.start.launcher import LaunchFailed, NodeFailed, RanksExited, signal_name
from toolkit.slurm.environment import step_environment
from toolkit.slurm.srun_commands import SrunStep, srun_argv

log = logs.get(__name__)

SrunEvent: TypeAlias = RanksExited | NodeFailed | LaunchFailed


class Srun:
    """One srun of the job. It ends its step when this process dies."""

    def __init__(self, plan: SrunStep, environ: Mapping[str, str], host_file: Path) -> None:
        """Start it. ``host_file`` is the file from which srun reads the node of each task."""
        fsio.write_atomic(host_file, "".join(f"{host}\n" for host in plan.hosts), durable=False)
        self._hosts = plan.hosts
        self._argv = srun_argv(plan)
        self._environ = {**step_environment(environ), "SLURM_HOSTFILE": str(host_file)}
        self.given_up = threading.Event()  #: no further start: its ranks are killed, or abandoned
        self._process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        return start_child(
            self._argv,
            self._environ,
            end_by=signal.SIGTERM,  # SIGKILL would leave its step running
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )

    def wait(self, put: Callable[[SrunEvent], None]) -> int:
        """Pass on what srun reports until it has ended; return its exit code.

        srun is started again while an ended step is in the way: a controller that was away learns of the end late.
        """
        deadline = time.monotonic() + limits().give_up_after_s
        while (refused := self._listen(put)) is not None:
            if time.monotonic() >= deadline or self.given_up.wait(limits().retry_every_s):
                put(refused)
                break
            self._process.wait()
            self._process = self._start()
        return self._process.wait()

    def _listen(self, put: Callable[[SrunEvent], None]) -> LaunchFailed | None:
        """Pass on what one srun reports; return a refusal that may pass."""
        refused: LaunchFailed | None = None
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                log.info("%s", line.rstrip())
                event = parse_srun_line(line, self._hosts)
                if isinstance(event, LaunchFailed) and _HELD_BY_A_STEP.search(event.why):
                    refused = event
                elif event is not None:
                    put(event)
        return refused

    def terminate(self) -> None:
        """Have srun end its step, by SIGTERM and, KillWait later, by SIGKILL."""
        self._process.terminate()

    def kill_client(self) -> None:
        """Kill srun and its helper, but not its step.

        srun would wait until Slurm gives a dead node up: 300 s by default, or more. srun leads a session. With it ends
        its helper, a child that outlives a killed srun to end its step. The helper would cancel the step by number, and
        when that reaches the controller the number may belong to the job's next start.
        """
        self.given_up.set()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


_NODE_FAILED = re.compile(r"srun: error: Node failure on (?P<host>\S+)")
#: A node that was away and has started again before Slurm noticed: its slurmd does not know the step.
_NODE_FORGOT = re.compile(r"srun: error: Aborting, io error and missing step on node (?P<index>\d+)")
_TASK_NOT_LAUNCHED = re.compile(r"srun: error: task (?P<rank>\d+) launch failed: (?P<why>.+?)\s*$")
_NODE_NOT_LAUNCHED = re.compile(r"srun: error: Task launch for \S+ failed on node (?P<host>[^\s:]+): (?P<why>.+?)\s*$")
_STEP_NOT_LAUNCHED = re.compile(
    r"srun: error: (?P<why>Unable to (?:create step|confirm allocation) for job \d+: .+?"
    r"|[Tt]imeout waiting for task launch.*?)\s*$"
)
#: The step asks for no memory, and shares the job's: only the record of an earlier step can be in the way.
_HELD_BY_A_STEP = re.compile("Memory required by task is not available")
_SRUN_ENDED = re.compile(r"srun: error: (?P<host>\S+): tasks? (?P<ranks>[\d,\-\[\]]+): (?P<how>.+?)\s*$")
_EXIT_CODE = re.compile(r"Exited with exit code (\d+)")
#: srun prints strsignal(3)'s text for the signal that ended a task.
_SIGNAL_TEXTS = {signal.strsignal(number): number for number in signal.valid_signals()}


def parse_srun_line(line: str, hosts: Sequence[str]) -> SrunEvent | None:
    """Return the failure that a line of srun reports; None for other lines, and for an unknown rank or node.

    An example is ``srun: error: node2: tasks 2-3: Exited with exit code 1``. ``hosts`` are the step's by rank.
    """
    if lost := _NODE_FAILED.match(line):
        return NodeFailed(lost["host"])
    # srun names this node only by its number in the step.
    if forgot := _NODE_FORGOT.match(line):
        after = sorted(set(hosts), key=_order_of_slurm)[int(forgot["index"]) :]
        return NodeFailed(after[0]) if after else None
    # Failed launches, from slurm/src/api/step_launch.c and libsrun, 22.05 to 24.11. ``--distribution=arbitrary`` makes
    # task numbers equal to ranks.
    if task := _TASK_NOT_LAUNCHED.match(line):
        rank = int(task["rank"])
        return LaunchFailed((rank,), hosts[rank], task["why"]) if rank < len(hosts) else None
    if node := _NODE_NOT_LAUNCHED.match(line):
        ranks = tuple(rank for rank, host in enumerate(hosts) if host == node["host"])
        return LaunchFailed(ranks, node["host"], node["why"])
    if step := _STEP_NOT_LAUNCHED.match(line):
        return LaunchFailed((), None, step["why"])
    ended = _SRUN_ENDED.match(line)
    if ended is None:
        return None
    host, how, now = ended["host"], ended["how"], time.time()
    numbers = ended["ranks"].strip("[]")
    ranks = tuple(map(int, hostlist.expand(f"[{numbers}]")))
    code = _EXIT_CODE.search(how)
    if code:
        return RanksExited(ranks, host, f"exit code {code[1]}", None, now, int(code[1]))
    text = how.removesuffix(" (core dumped)")
    out_of_memory = "Out Of Memory" in text
    number = signal.SIGKILL if out_of_memory else _SIGNAL_TEXTS.get(text)
    if number:
        how = f"killed by {signal_name(number)} ({how})"
    return RanksExited(ranks, host, how, number, now, None, out_of_memory)


def _order_of_slurm(host: str) -> tuple[str, int]:
    """Return the key by which Slurm numbers nodes, also with an arbitrary distribution."""
    number = re.search(r"\d*$", host)
    assert number is not None
    return host[: number.start()], int(number[0] or -1)
