"""The agent of one node: ``python -m toolkit.nodes.agent.node SECRET_FILE LOGS HOST PORT START [NAME]``.

It lives as long as the job, has one thread and needs no torch. On the supervisor's order it starts the ranks of each
attempt and the attempt's store. All ranks of the node report to it, also those that srun has started. When the
supervisor has died, it ends the ranks and connects to the next one. It keeps the zygote and the memory in which ranks
have left their state. When the agent dies the ranks die with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from toolkit.base import fsio, logs, this_node
from toolkit.base.this_node import bare_python
from toolkit.devices import on_node
from toolkit.nodes.agent import agent_components, messages, preimports, reports, wire_protocol
from toolkit.nodes.agent.die_with_parent import SIGNALS, ignore_signals
from toolkit.nodes.agent.helpers import Helpers, parsed
from toolkit.nodes.agent.processes import Processes
from toolkit.nodes.agent.reports import Inbox, NodeProgress, addresses, token_of
from toolkit.nodes.agent.wire_protocol import HEARTBEAT_S, SILENT_S, AuthenticatedConnection, AuthenticationError

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
CONNECT_S = 30.0
#: A supervisor that has not confirmed sent data for this long is gone; a network may be away for half a minute.
GONE_S = 120
#: Within this time of a supervisor's death its ranks have ended, and the next one has sent something.
NEXT_WITHIN_S = 20.0
#: Messages about the node, and not about an attempt: the next supervisor gets them, too.
ABOUT_THE_NODE = (messages.ZygoteReady, messages.NodeSick)
#: An agent of this job that the supervisor has given up needs a moment to notice it; then it is killed.
INBOX_WAIT_S = 10.0
#: What ranks have left behind is killed within this time when the agent ends.
STRAYS_S = 1.0
#: Agents begin to watch the batch host one after the other: where the first one can, the others need not.
TURN_S = 10.0
#: Finds the CPUs near the GPUs, see toolkit.devices.on_node.
GPUS_COMMAND = bare_python("toolkit.devices.on_node")

log = logs.get(__name__)


class Agent:
    """Serves one supervisor, and each that comes after it."""

    def __init__(
        self,
        connect: Callable[[], socket.socket],
        secret: bytes,
        who: tuple[str, int],
        inbox: Inbox,
        imports: Path | None,
    ) -> None:
        """``who``: its host, and the number of the start by which it came, which the supervisor may have given up."""
        self._connect, self._secret, self._who = connect, secret, who
        self._connection: socket.socket | None = None  #: None while the ranks of a dead supervisor end
        self._kept: list[messages.Message] = []  #: those ``ABOUT_THE_NODE``
        self._give_up_at = math.inf  #: the time by which the next supervisor must send something
        self._inbox, self._progress = inbox, NodeProgress()
        self._ignored = logs.RateLimitedWarnings(log)
        self._heard = time.monotonic()  #: when the supervisor last sent something, or was lost
        self._is_alone = self._is_over = False  #: the supervisor is lost for good; all is done
        self._watch_order: messages.WatchBatchHostOrder | None = None
        self._watcher: int | None = None  #: the pid of the process that watches the batch host
        self._selector = selectors.DefaultSelector()
        self._helpers = Helpers(self._selector)
        self._monitor = agent_components.node_monitor(self._helpers, self._send)
        self._processes = Processes(self._selector, self._send, imports)
        self._copies = agent_components.file_stager(self._helpers, self._processes, self._send)

    def serve(self) -> None:
        """Serve until the supervisor sends ``leave``, or is gone. Then every rank has been ended."""
        # Signals wake the selector through this socket pair, so that an ended rank is noticed at once.
        waker, woken = socket.socketpair()
        for end in (waker, woken):
            end.setblocking(False)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, *SIGNALS):
            signal.signal(number, lambda *_: None)
        self._selector.register(woken, selectors.EVENT_READ, lambda: self._processes.pass_on(woken.recv(4096)))
        self._selector.register(self._inbox, selectors.EVENT_READ, self._take_reports)
        self._open_connection(again=False)
        if on_node.has_gpus():  # before the first ranks, which wait for the import of torch
            self._helpers.ask_if_possible(GPUS_COMMAND, self._processes.set_near_cpus)
        next_heartbeat = 0.0
        try:
            while not self._is_over:
                for key, _ in self._selector.select(HEARTBEAT_S):
                    key.data()
                self._reap()
                # No rank of a dead supervisor is left: the next one may start others.
                if self._connection is None and not self._is_alone and not self._processes.live:
                    self._return()
                now = time.monotonic()
                if now >= self._give_up_at:  # the next supervisor has sent nothing
                    self._be_alone()
                self._watch_the_batch_host()
                if now >= next_heartbeat:
                    next_heartbeat = now + HEARTBEAT_S
                    self._send(messages.NodeAlive(self._progress.summarize(), self._monitor.at_heartbeat()))
                    self._processes.check_timers()
        finally:
            self._processes.end_all()
            deadline = time.monotonic() + STRAYS_S
            while self._processes.end_strays(self._helpers.pids) and time.monotonic() < deadline:
                time.sleep(0.01)
                self._reap()

    def _open_connection(self, *, again: bool) -> None:
        """Connect, and send what a supervisor that was not there before must know. Raises OSError."""
        connection, self._link = self._connect(), AuthenticatedConnection(self._secret, "agent")
        self._connection = connection
        self._selector.register(connection, selectors.EVENT_READ, self._receive)
        connection.sendall(self._link.greeting)
        connection.sendall(self._link.send(messages.AgentHere(*self._who, again)))
        for message in self._kept:
            connection.sendall(self._link.send(message))

    def _send(self, message: messages.Message) -> None:
        if isinstance(message, ABOUT_THE_NODE):
            self._kept.append(message)
        if self._connection is not None and not self._is_over:
            try:
                self._connection.sendall(self._link.send(message))
            except OSError:
                self._lose_supervisor()

    def _receive(self) -> None:
        if self._connection is None:
            return  # it was lost after the selector had looked
        try:
            data = self._connection.recv(1 << 16, socket.MSG_DONTWAIT)
            orders, answer = self._link.receive(data)
            if answer:
                self._connection.sendall(answer)
        except BlockingIOError:
            return  # it was the one before that had something to read
        except OSError:
            data = b""
        if not data:
            self._lose_supervisor()
            return
        # Only authenticated messages count as a sign of life.
        if self._link.is_genuine:
            self._heard, self._give_up_at = time.monotonic(), math.inf
        for order in orders:
            self._handle(order)

    def _handle(self, order: messages.Message) -> None:
        match order:
            case messages.WarmOrder():
                self._processes.warm()
            case messages.CheckOrder():
                self._check(order)
            case messages.StuckConnectionsOrder():
                self._send(messages.StuckConnectionsAnswered(order.request, tuple(sorted(wire_protocol.unanswered()))))
            case messages.StartOrder():
                # First, since files of a copy may have been removed since the last start.
                self._copies.check()
                self._processes.start(order)
            case messages.SignalOrder():
                self._processes.signal(order.attempt, signal.Signals(order.number))
            case messages.StoreInput():
                self._processes.write_to_store(order.attempt, order.text)
            case messages.EndStoreOrder():
                self._processes.end_store(order.attempt)
            case messages.StacksOrder():
                self._digest_stacks(order)
            case messages.ReportsOrder():
                # The answer says that all reports have been passed on: the step's end must come after them.
                self._take_reports()
                self._send(messages.RequestAnswered(order.request))
            case messages.WatchBatchHostOrder():
                self._watch_order = order
            case messages.WatchRanksOrder():
                self._monitor.watch_ranks(order)
                if not self._monitor:  # it has failed here
                    self._send(messages.RankWatchEnded(order.attempt))
            case messages.StageOrder():
                self._copies.stage(order)
                if not self._copies:  # it has failed here: what waits for copies does without
                    self._processes.use_copies({})
                    self._send(messages.NodeStaged({}, ("what copies has failed",)))
            case messages.LeaveOrder():
                self._is_over = True

    # ----------------------------------------------------------------------------------------------- the supervisor

    def _lose_supervisor(self) -> None:
        """End the ranks: the next supervisor starts others, and no two attempts may run at once."""
        if self._connection is None:
            return
        self._close_connection()
        if not self._link.is_genuine:  # it was the next one
            self._be_alone()
            return
        log.warning("the supervisor is gone: ending the ranks, and looking for another one")
        self._processes.end_attempt()
        self._heard = time.monotonic()
        self._give_up_at = self._heard + NEXT_WITHIN_S

    def _return(self) -> None:
        """Connect again. Where the guard is gone, too, the port is closed and no supervisor will come."""
        try:
            self._open_connection(again=True)
        except OSError as error:
            log.warning("there is no other supervisor: %s", error)
            self._be_alone()

    def _close_connection(self) -> None:
        if self._connection is not None:
            self._selector.unregister(self._connection)
            self._connection.close()
            self._connection = None

    def _be_alone(self) -> None:
        """End the ranks. The agent ends, too, unless it has an order to watch the batch host."""
        if not self._is_alone:
            log.warning("no supervisor is left: ending the ranks")
            self._is_alone, self._give_up_at = True, math.inf
            self._close_connection()
            self._processes.end_all()
            self._selector.unregister(self._inbox)
            self._inbox.close()  # ranks that srun has started end by themselves
            self._is_over = self._watch_order is None

    def _watch_the_batch_host(self) -> None:
        """Watch the batch host while the supervisor is silent or gone. End the watch when it is back."""
        order = self._watch_order
        if order is None:
            return
        silent_s = time.monotonic() - self._heard
        is_silent = self._is_alone or silent_s > SILENT_S
        if self._watcher is not None and not is_silent:
            os.kill(self._watcher, signal.SIGKILL)
            self._watcher = None
        elif self._watcher is None and is_silent and silent_s > SILENT_S + order.turn * TURN_S:
            log.warning("the supervisor has been silent for %.0f s: checking the batch host", silent_s)
            with contextlib.suppress(OSError):  # no memory or no processes are left: tried again within a second
                self._watcher = self._helpers.start(order.command)

    def _check(self, order: messages.CheckOrder) -> None:
        began = time.time()

        def take(text: bytes) -> None:
            self._send(messages.CheckAnswered(order.request, text.decode(errors="replace"), began, time.time()))

        try:
            self._helpers.ask(order.command, take, awaits_end=False)
        except OSError as error:
            take(f"they cannot be started: {error}".encode())

    # ----------------------------------------------------------------------------------------------------- the ranks

    def _take_reports(self) -> None:
        """Take what ranks have reported, and pass on what cannot wait for the next digest."""
        first: dict[int, list[int]] = {}
        for text in [] if self._is_alone else self._inbox.take():
            report = reports.parse(text)
            if report is None:
                self._ignored.warn("an invalid report was ignored: %.80r", text)
                continue
            # A rank's first report is sent at once, not with the next digest, and rank 0's reports are sent whole.
            if self._progress.on_report(report):
                first.setdefault(report.attempt, []).append(report.rank)
            if report.rank == 0:
                self._send(messages.MainRankReport(text.decode()))
        for attempt, ranks in first.items():
            self._send(messages.RanksReporting(attempt, self._who[0], tuple(ranks)))

    def _digest_stacks(self, order: messages.StacksOrder) -> None:
        """Read the stacks of ranks in a separate process: a file server may not answer."""
        rank_progress = tuple(self._progress.of_rank(order.attempt, rank.rank) or rank for rank in order.rank_progress)

        def take(text: bytes) -> None:
            groups = parsed(text, list[Any])
            if groups is not None:
                self._send(messages.StacksAnswered(order.request, groups))

        asked = order.replace(rank_progress=rank_progress).to_json()
        self._helpers.ask_if_possible(order.command, take, json.dumps(asked).encode())

    def _reap(self) -> None:
        """Reap ended processes. The agent is also the new parent of those that a rank has left behind."""
        has_reaped = False
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            has_reaped = True
            self._helpers.pids.discard(pid)
            if pid in self._processes:
                self._take_reports()  # so the last reports of the process are sent before its end
                self._processes.note_end(pid, status)
            elif pid == self._watcher:
                self._watcher, self._heard = None, time.monotonic()  # a failed watch is started again
                self._is_over |= status == 0
        if has_reaped:
            self._processes.report_ended()
            self._processes.end_strays(self._helpers.pids)


def _connect(host: str, port: int) -> socket.socket:
    connection = socket.create_connection((host, port), timeout=CONNECT_S)
    connection.settimeout(None)
    wire_protocol.enable_keepalive(connection, GONE_S)
    return connection


def main(arguments: Sequence[str]) -> None:
    """Connect to the supervisor, and serve it."""
    ignore_signals()  # until there may be ranks to pass them on to
    fsio.set_private_umask()
    secret_file, logs_dir, host, port, start = arguments[:5]
    name = arguments[5] if len(arguments) > 5 else os.environ.get("SLURMD_NODENAME", socket.gethostname())
    try:
        secret = fsio.read_bytes(Path(secret_file))
    except OSError as error:
        sys.exit(f"{secret_file}: {error.strerror}: have the file system of the run folder remounted on {name}")
    # Redirect stdout and stderr, the zygote's too. Where the file cannot be written they go nowhere. srun's --output is
    # not used: with it Slurm starts nothing on such a node, and the reason would not be known.
    log_path = Path(logs_dir) / f"agent-{name}.log"
    try:
        file = fsio.open_private(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    except OSError as error:
        print(f"{log_path}: {error.strerror}", file=sys.stderr)
        file = os.open(os.devnull, os.O_WRONLY)
    for output in (1, 2):
        os.dup2(file, output)
    os.close(file)
    logs.setup(f"agent {name}")
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)  # ranks are forked two levels below the zygote
    # Here, and not in each rank: a fork whose variables differ from the zygote's may not run a script.
    os.environ.update(this_node.cache_variables(os.environ))
    host = host or os.environ["SLURM_LAUNCH_NODE_IPADDR"]  # the supervisor runs where srun runs
    try:
        inbox, imports = Inbox(addresses(token_of(secret)), INBOX_WAIT_S), Path(secret_file).parent / preimports.NAME
        who = name, int(start)
        Agent(partial(_connect, host, int(port)), secret, who, inbox, imports).serve()
    except AuthenticationError as error:
        sys.exit(f"{host}:{port} is not the supervisor: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
