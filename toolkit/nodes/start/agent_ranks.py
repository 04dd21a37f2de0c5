"""The store and ranks of one attempt, as run by the agents of its nodes."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Sequence

from toolkit.base.errors import EXIT_FAILED
from toolkit.nodes.agent.link import Message
from toolkit.nodes.allocation import Allocation
from toolkit.nodes.start.agent_links import AgentLinks
from toolkit.nodes.start.launcher import AllRanksEnded, Events, LaunchFailed, RanksExited, RanksFinished, signal_name
from toolkit.nodes.start.store import StoreHostEnded, port_in


class AgentStore:
    """The store of one attempt, on the supervisor's node: a :class:`~toolkit.nodes.start.launcher.Store`."""

    def __init__(self, attempt: int, host: str, events: Events, links: AgentLinks) -> None:
        self.attempt = attempt
        self.port: int | None = None
        self.events, self._host, self._links = events, host, links
        self._text = ""
        self._on_ready: list[Callable[[], None]] = []
        self.is_closing = False
        self._is_over = False

    def propose(self, kind: str, by: str) -> None:
        text = json.dumps({"propose": kind, "by": by}) + "\n"
        self._links.call(lambda: self.when_ready(lambda: self._send(do="tell", text=text)))

    def close(self) -> None:
        self.is_closing = True
        self._send(do="end_store")

    def _send(self, **order: str) -> None:
        message = {**order, "attempt": self.attempt}
        self._links.call(lambda: self._links.send(self._host, message))

    # of the thread

    def when_ready(self, call: Callable[[], None]) -> None:
        """Call ``call`` as soon as the port is known."""
        if self.port is not None:
            call()
        else:
            self._on_ready.append(call)

    def take(self, text: str) -> None:
        """Take a piece of the store's output, and find the port in it."""
        *lines, self._text = (self._text + text).split("\n")
        for line in lines:
            port = port_in(line)
            if self.port is None and port is not None:
                self.port = port
                for call in self._on_ready:
                    call()

    def end(self, code: int, *, out_of_memory: bool = False) -> None:
        """Note that the store has ended, or will never begin."""
        if not self._is_over:
            self._is_over = True
            if not self.is_closing:
                self.events.put(StoreHostEnded(code or EXIT_FAILED, out_of_memory))


class AgentRanks:
    """The ranks of one attempt: :class:`~toolkit.nodes.start.launcher.RunningRanks`.

    All methods except ``kill`` and ``abandon`` are called in the links' thread.
    """

    tells_each_end = True

    def __init__(self, attempt: int, allocation: Allocation, events: Events, links: AgentLinks) -> None:
        self._attempt, self._events, self._links = attempt, events, links
        self._ranks = allocation.ranks_of
        self._still_running = set(range(allocation.world_size))
        self._exit_code = 0
        self.hosts = allocation.hosts
        self.orders: dict[str, Message] = {}  #: not sent yet
        self.may_begin = False

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        self._links.call(lambda: self._kill(number))

    def _kill(self, number: signal.Signals) -> None:
        if number is signal.SIGKILL:
            for host in list(self.orders):  # hosts whose agents have not connected yet
                del self.orders[host]
                ranks = self._ranks_on(host)
                self._events.put(RanksExited(tuple(ranks), host, "killed before it was started", number, time.time()))
                self._end(ranks, -number)
        for host in self.hosts:
            self._links.send(host, {"do": "signal", "attempt": self._attempt, "number": int(number)})

    def abandon(self) -> None:
        def give_up() -> None:
            hosts = [host for host in self.hosts if self._ranks_on(host)]
            self._end(list(self._still_running), EXIT_FAILED)
            for host in hosts:  # if the node comes back, its agent finds the connection closed and ends the ranks
                self._links.drop(host, "its ranks were given up")

        self._links.call(give_up)

    def _ranks_on(self, host: str) -> list[int]:
        return [rank for rank in self._ranks.get(host, ()) if rank in self._still_running]

    def take(self, host: str, message: Message) -> None:
        """Take a message of the agent of ``host`` about this attempt's ranks."""
        rank = message["rank"]
        # The message may be of an earlier attempt, or of a rank that was already counted as ended.
        if message["attempt"] != self._attempt or rank not in self._ranks_on(host):
            return
        if message["is"] == "not_started":
            self._events.put(LaunchFailed((rank,), host, message["why"]))
            self._end([rank], EXIT_FAILED)
        elif message["is"] == "ended":
            code = message["code"]
            if code == 0:
                self._events.put(RanksFinished((rank,)))
            else:
                number, out_of_memory = (-code if code < 0 else None), message["out_of_memory"]
                how = f"killed by {signal_name(number)}" if number else f"exit code {code}"
                if out_of_memory:
                    how = f"{how} (Out Of Memory)"
                exit_code = None if number else code
                self._events.put(RanksExited((rank,), host, how, number, message["time"], exit_code, out_of_memory))
            self._end([rank], code)

    def lose(self, host: str, why: str) -> None:
        """Note that the agent of ``host`` has ended, and its ranks with it."""
        ranks = self._ranks_on(host)
        if ranks:
            how = f"killed by SIGKILL ({why})"
            self._events.put(RanksExited(tuple(ranks), host, how, signal.SIGKILL, time.time(), with_agent=True))
            self._end(ranks, -signal.SIGKILL)

    def never_began(self, host: str, why: str) -> None:
        """Note that no agent could be started on ``host``."""
        if self.orders.pop(host, None) is not None:
            ranks = self._ranks_on(host)
            self._events.put(LaunchFailed(tuple(ranks), host, why))
            self._end(ranks, EXIT_FAILED)

    def _end(self, ranks: Sequence[int], code: int) -> None:
        if not self._still_running:
            return
        # The step's exit code is the first failure's; the step ends with its last rank.
        self._exit_code = self._exit_code or code
        self._still_running -= set(ranks)
        if not self._still_running:
            self._events.put(AllRanksEnded(self._exit_code))
