"""Make all checks of this node once, and print their findings as a JSON line."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

from toolkit.base import hostlist
from toolkit.plugins.site.checks import (
    ASKING_LIMIT_S,
    FIRST_NODE,
    LAUNCHER,
    CheckAnswer,
    CheckRequest,
    Finding,
    devices,
    host,
    ok,
)
from toolkit.slurm import network

#: For questions that the kernel itself answers. Silence means a starved or broken node.
QUICK_LIMIT_S = 10.0
#: The tasks that print the names of all nodes, for the nodes that print nothing. With thousands of nodes a few suffice.
TELL_ALL_NAMES = 8


@dataclass(frozen=True)
class Check:
    """One check. It runs in a thread, which hangs if a file system or a driver does: then ``silent`` is the finding."""

    run: Callable[[], list[Finding]]
    limit_s: float
    silent: Finding


def check_node(request: CheckRequest, name: str, task: int) -> list[Finding]:
    """Make all checks at once. Return their findings when each has ended or its time is up."""
    began = time.monotonic()
    running = [(check, _start(check)) for check in _checks(request, name, task)]
    # All checks run already, so their limits run from the same start.
    findings: list[Finding] = []
    for check, answers in running:
        try:
            findings += answers.get(timeout=max(0.0, began + check.limit_s - time.monotonic()))
        except Empty:
            findings.append(check.silent)
    return findings


def _start(check: Check) -> SimpleQueue[list[Finding]]:
    answers: SimpleQueue[list[Finding]] = SimpleQueue()

    def run() -> None:
        try:
            answers.put(check.run())
        except Exception as error:  # a node with a strange /proc or driver is checked for the rest
            text = f"the check itself failed ({error!r}); please report it"
            answers.put([Finding(check.silent.check, "warning", "?", text)])

    threading.Thread(target=run, daemon=True).start()
    return answers


def _checks(request: CheckRequest, name: str, task: int) -> list[Check]:
    asked = request.cpus_of(task)
    folder, temporary = Path(request.folder), Path(os.environ.get("TMPDIR") or "/tmp")
    # A hanging file system cannot be interrupted: the thread is left behind, and the finding says so.
    runs = folder.parent

    def disk(check: str, path: Path, run: Callable[[], Finding]) -> Check:
        limit_s = request.disk_limit_s
        text = f"{path} does not answer within {limit_s:g} s: its server is away, or the mount hangs; remount it"
        return Check(lambda: [run()], limit_s, Finding(check, "bad", "hangs", text))

    def asking(check: str, whom: str, run: Callable[[], list[Finding]]) -> Check:
        text = f"{whom} does not answer within {ASKING_LIMIT_S:g} s; have the node looked at"
        return Check(run, ASKING_LIMIT_S, Finding(check, "bad", "hangs", text))

    def quick(run: Callable[[], list[Finding]]) -> Check:
        text = f"did not finish its checks within {QUICK_LIMIT_S:g} s"
        return Check(run, QUICK_LIMIT_S, Finding("answer", "bad", "none", text))

    # A look-up that has not ended within three times the warning's limit is reported as slow.
    look_up_s = 3 * host.LOOK_UP_WARNING_S
    slow = host.slow_look_up(f"takes more than {look_up_s:g} s", f"> {look_up_s:g} s")
    return [
        asking("network", "the name service", lambda: _find_address(request)),
        Check(lambda: _look_up(request), look_up_s, slow),
        asking("gpus", "the driver of the GPUs", lambda: devices.check_gpus(request.gpus, os.environ)),
        quick(lambda: [host.check_cpus(asked)]),
        quick(lambda: _check_limits(request.gpus)),
        *([quick(host.check_speeds)] if request.may_load else []),
        disk("shared folder", runs, lambda: host.check_shared(folder, request.token, name)),
        disk("run folder space", runs, lambda: host.check_space("run folder space", runs)),
        disk("temp space", temporary, lambda: host.check_space("temp space", temporary)),
    ]


def _check_limits(gpus: int) -> list[Finding]:
    fabric = devices.check_infiniband()
    # Only InfiniBand needs locked memory.
    has_ports = any(finding.value for finding in fabric)
    locked = [host.check_locked_memory(gpus)] if has_ports else []
    return [host.check_open_files(), *fabric, *locked]


def _find_address(request: CheckRequest) -> list[Finding]:
    """Return a finding with this node's address on the ranks' network."""
    try:
        return [ok("network", _address(request))]
    except Exception as error:
        return [Finding("network", "bad", "none", f"{error}; have the node's network looked at")]


def _look_up(request: CheckRequest) -> list[Finding]:
    """Return a finding on how long the name service takes for our address; none without one, see above."""
    try:
        address = _address(request)
    except Exception:
        return []
    return [host.check_look_up(address)]


def _address(request: CheckRequest) -> str:
    peer = request.peer
    if peer == LAUNCHER:
        peer = os.environ["SLURM_LAUNCH_NODE_IPADDR"]
    elif peer == FIRST_NODE:
        peer = hostlist.expand(os.environ["SLURM_STEP_NODELIST"])[0]
    return network.rank_address(os.environ, peer)


def main() -> None:
    """Check the node as the first argument says, a CheckRequest in JSON."""
    began = time.time()
    request = CheckRequest(**json.loads(sys.argv[1]))
    name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    task = int(os.environ.get("SLURM_PROCID", "0"))
    findings = tuple(check_node(request, name, task))
    nodes = os.environ.get("SLURM_STEP_NODELIST", "") if task < TELL_ALL_NAMES else ""
    line = json.dumps(asdict(CheckAnswer(name, began, time.time(), findings, nodes))) + "\n"
    os.write(1, line.encode())
    os._exit(0)  # a normal exit would wait for a thread that hangs in the kernel


if __name__ == "__main__":
    main()
