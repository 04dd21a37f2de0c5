"""One node's side of the conversation with `toolkit.launch.preflight`, in lines of JSON.

The node says ``hello``, where it is ``listening``, findings, how it went with each peer, and ``done``. The caller names
the ``peers`` in between, and closes stdin when all are done: until then another node may still need this one.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from toolkit.cluster import hostlist, network
from toolkit.cluster.checks import (
    FIRST_NODE,
    LAUNCHER,
    TOKEN_VARIABLE,
    Finding,
    Request,
    cpus,
    devices,
    host,
    ok,
    pairs,
    storage,
)

#: How long a program or server of the node, and a file system, are waited for.
ASKING_LIMIT_S = 15.0
#: For a file system: of the time for all checks.
DISK_LIMIT_SHARE = 0.32
#: The first tasks; one of them may be the one that is dead.
TELL_ALL_NAMES = 8


@dataclass(frozen=True)
class Check:
    """Runs in a thread of its own, which hangs where a file system or a driver does: ``silent`` is said then."""

    run: Callable[[], list[Finding]]
    limit_s: float
    silent: Finding


class Node:
    """The checks of this node, and their answers on stdout."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        self._task = int(os.environ.get("SLURM_PROCID", "0"))
        self._events: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._silent_at: dict[str, tuple[float, Finding]] = {}
        self._adder: pairs.Adder | None = None
        self._peers: set[str] | None = None if request.pairs else set()
        self._is_done = self._is_dismissed = False

    def talk(self) -> None:
        """Until the caller dismisses us, or time is up."""
        deadline = time.monotonic() + self._request.limit_s
        # Some tell the names of all nodes, for those that say nothing. Of thousands, all need not.
        names = os.environ.get("SLURM_STEP_NODELIST", "") if self._task < TELL_ALL_NAMES else ""
        say({"hello": self._name, "time": time.time(), "nodes": names})
        for name, check in self._checks().items():
            self._start(name, check)
        if self._request.pairs:
            threading.Thread(target=self._listen, daemon=True).start()
        while not self._is_dismissed and time.monotonic() < deadline:
            wake = min([deadline, *(at for at, _ in self._silent_at.values())])
            try:
                self._events.get(timeout=max(0.0, wake - time.monotonic()))()
            except Empty:
                self._give_up_silent()
            self._look_whether_done()

    # ------------------------------------------------------------------------------------------------------ checks

    def _checks(self) -> dict[str, Check]:
        request = self._request
        asked = request.cpus_of(self._task)
        folder, temporary = Path(request.folder), Path(os.environ.get("TMPDIR") or "/tmp")

        def disk(check: str, path: Path, run: Callable[[], Finding]) -> Check:
            return _disk(check, path, DISK_LIMIT_SHARE * request.limit_s, run)

        return {
            "network": _asking("network", "the name service", self._find_address),
            "gpus": _asking("gpus", "nvidia-smi", lambda: devices.check_gpus(request.gpus, os.environ)),
            "cpus": _quick(lambda: [cpus.check_cpus(asked)]),
            "cpus taken": _quick(lambda: [cpus.check_taken(asked)]),
            "limits": _quick(self._check_limits),
            "shared folder": disk(
                "shared folder", folder.parent, lambda: storage.check_shared(folder, request.token, self._name)
            ),
            "run folder space": disk(
                "run folder space", folder.parent, lambda: storage.check_space("run folder space", folder.parent)
            ),
            "temp space": disk("temp space", temporary, lambda: storage.check_space("temp space", temporary)),
        }

    def _check_limits(self) -> list[Finding]:
        fabric = devices.check_infiniband()
        has_ports = any(finding.value for finding in fabric)
        locked = [host.check_locked_memory(self._request.gpus)] if has_ports else []
        return [host.check_open_files(), *fabric, *locked]

    def _find_address(self) -> list[Finding]:
        """Our address among the ranks, where the others of a pair find us, and how long its name takes."""
        try:
            address = network.rank_address(os.environ, self._peer())
            if self._request.pairs:
                self._adder = pairs.Adder(address, self._request.token)
                say({"listening": [address, self._adder.port]})
        except Exception as error:
            return [Finding("network", "bad", "none", f"{error}; have the node's network looked at")]
        limit_s = 3 * host.LOOK_UP_WARNING_S
        silent = host.slow_look_up(f"takes more than {limit_s:g} s", f"> {limit_s:g} s")
        look_up = Check(lambda: [host.check_look_up(address)], limit_s, silent)
        self._events.put(lambda: self._start("look-up", look_up))
        return [ok("network", address)]

    def _peer(self) -> str:
        if self._request.peer == LAUNCHER:
            return os.environ["SLURM_LAUNCH_NODE_IPADDR"]
        if self._request.peer == FIRST_NODE:
            return hostlist.expand(os.environ["SLURM_STEP_NODELIST"])[0]
        return self._request.peer

    def _start(self, name: str, check: Check) -> None:
        self._silent_at[name] = (time.monotonic() + check.limit_s, check.silent)
        threading.Thread(target=self._run, args=[name, check], daemon=True).start()

    def _run(self, name: str, check: Check) -> None:
        try:
            found = check.run()
        except Exception as error:  # a node with a strange /proc or driver is checked for the rest
            found = [Finding(name, "warning", "?", f"the check itself failed ({error!r}); please report it")]
        self._events.put(lambda: self._tell(name, found))

    def _tell(self, name: str, findings: Sequence[Finding]) -> None:
        if self._silent_at.pop(name, None) is not None:  # else it was too late
            for finding in findings:
                say(asdict(finding))

    def _give_up_silent(self) -> None:
        now = time.monotonic()
        for name, (at, silent) in list(self._silent_at.items()):
            if at <= now:
                self._tell(name, [silent])

    # ------------------------------------------------------------------------------------------------------- pairs

    def _listen(self) -> None:
        """To the caller, who names the peers and closes our stdin when nobody needs us any more."""
        for line in sys.stdin:
            peers = json.loads(line)["peers"]
            say({"time": time.time()})
            self._events.put(lambda peers=peers: self._meet(peers))  # type: ignore[misc]
        self._events.put(self._dismiss)

    def _meet(self, peers: Sequence[tuple[str, str, int]]) -> None:
        names = [name for name, _, _ in peers]
        mine = [peers[j] for i, j in pairs.partners(len(peers)) if names[i] == self._name]
        self._peers = {name for name, _, _ in mine}
        for peer in mine:
            threading.Thread(target=self._exchange, args=[peer], daemon=True).start()

    def _exchange(self, peer: tuple[str, str, int]) -> None:
        assert self._adder is not None
        told = self._adder.exchange(*peer)
        self._events.put(lambda: self._tell_exchange(told))

    def _tell_exchange(self, told: pairs.Exchange) -> None:
        assert self._peers is not None
        self._peers.discard(told.peer)
        say(asdict(told))

    # --------------------------------------------------------------------------------------------------------- end

    def _look_whether_done(self) -> None:
        if not self._is_done and not self._silent_at and self._peers == set():
            self._is_done = True
            say({"done": self._name})
            self._is_dismissed = self._is_dismissed or not self._request.pairs

    def _dismiss(self) -> None:
        self._is_dismissed = True


def _asking(check: str, whom: str, run: Callable[[], list[Finding]]) -> Check:
    text = f"{whom} does not answer within {ASKING_LIMIT_S:g} s; have the node looked at"
    return Check(run, ASKING_LIMIT_S, Finding(check, "bad", "hangs", text))


def _quick(run: Callable[[], list[Finding]]) -> Check:
    """It reads what the kernel knows; silence is a starved or broken node."""
    return Check(run, 10.0, Finding("answer", "bad", "none", "does not get through its checks within 10 s"))


def _disk(check: str, path: Path, limit_s: float, run: Callable[[], Finding]) -> Check:
    text = f"{path} does not answer within {limit_s:g} s: its file server is away, or the mount hangs; mount it anew"
    return Check(lambda: [run()], limit_s, Finding(check, "bad", "hangs", text))


def say(content: dict[str, Any]) -> None:
    """One line, in one piece: several threads speak."""
    os.write(1, (json.dumps(content) + "\n").encode())


def main() -> None:
    Node(Request(**json.loads(sys.argv[1]), token=os.environ[TOKEN_VARIABLE])).talk()
    os._exit(0)  # a thread that hangs in the kernel would be waited for


if __name__ == "__main__":
    main()
