"""One rank's side of the agreement: its main thread passes the gate before each step."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from toolkit.base import logs
from toolkit.base.errors import ToolkitError
from toolkit.ranks.agreement.rounds import (
    PREFIX,
    STOP,
    Ack,
    Round,
    Transport,
    acknowledge,
    find_missing,
    parse_proposal,
    propose,
)

#: torch's store complains on stderr when a wait times out, so an idle watcher waits practically for ever.
IDLE_S = 86_400.0
#: Acknowledging takes milliseconds; a wait reaches this length only if a rank is frozen or dead.
DECISION_S = 30.0
#: How long ``close()`` waits for the gate's threads.
LEAVE_S = 10.0

log = logs.get(__name__)


@dataclass(frozen=True)
class StalledRequest:
    """A request of a ``kind`` that has not been handed out. This rank has known of it for ``waited_s``."""

    kind: str
    waited_s: float
    #: The agreed step; None while some ranks have not acknowledged.
    step: int | None
    #: The ranks that have not acknowledged; once a step is agreed, those that have not reached it. At most
    #: ``MOST_NAMED``; empty when the store does not answer.
    missing: tuple[int, ...]
    #: The number of missing ranks beyond these.
    more: int = 0

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.missing)) or "unknown (the store does not answer)"
        ranks += f" and {self.more} more" if self.more else ""
        verb = "acknowledged it" if self.step is None else f"come to step {self.step}"
        return f"{self.kind!r} asked for {self.waited_s:.0f} s ago; ranks that have not {verb}: {ranks}"


class _Asked(NamedTuple):
    """A kind that is wanted: since when, and from which round on. ``propose``: it must still be proposed."""

    kind: str
    since: float
    round: int
    propose: bool


class Gate:
    """One rank's side of the agreement. The main thread calls ``boundary`` and ``close``; any thread ``request``."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        connect: Callable[[], Transport],
        *,
        ask: Transport | None = None,
        prefix: str = PREFIX,
        force_after_s: float | None = None,
        on_hang: Callable[[StalledRequest], None] = lambda hang: log.error("%s", hang),
    ) -> None:
        """Open the gate with two clients of the store.

        ``connect`` makes a client; two threads get one each. The one that blocks only for moments takes ``ask`` instead
        if that is given, which others may use as well.

        ``on_hang`` is called once, from a thread, for each kind that ``boundary`` has not handed out ``force_after_s``
        after this rank asked for it or heard of it. So that time must cover the longest way from one boundary to the
        next, including a save and an evaluation that is cut short. ``close()`` ends it. None: never.
        """
        self._rank, self._world_size, self._prefix = rank, world_size, prefix
        self._force_after_s = force_after_s
        self._on_hang = on_hang
        #: The kind proposed or decided and not yet handed out: long work may cut itself short for it.
        self.pending: str | None = None
        self._started = -1
        self._closed = False
        self._round = 0  # written by the main thread only
        self._agreed: tuple[str, int] = ("", 0)
        self._failure: Exception | None = None
        self._stopped = self._leaving = False
        self._decided, self._handed_out = threading.Event(), threading.Event()
        self._asked: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=run, args=(client,), name=f"toolkit-gate-{name}", daemon=True)
            for name, run, client in (
                ("watch", self._watch, connect()),
                ("propose", self._propose, connect() if ask is None else ask),
            )
        ]
        for thread in self._threads:
            thread.start()

    def boundary(self, n: int) -> str | None:
        """Return None if step ``n`` may start. Call this right before it, that is after n steps.

        Otherwise returns the kind agreed on for this boundary, on every rank at the same ``n``. Act, then ask again
        with the same n until None comes; after "stop" it never does. Blocks only while an agreement is open, for
        milliseconds. Raises ToolkitError when the store is gone, because no agreement is possible any more.
        """
        self._started = n  # first: the watcher closes the gate and then reads this
        return self._await_decision(n) if self._closed else None

    def request(self, kind: str) -> None:
        """Ask that all ranks get ``kind`` at one boundary soon. Never blocks.

        Any thread may call it, and a signal handler too. Two requests before the kind is handed out count as one.
        Nothing is promised after ``close()``.
        """
        self._asked.put(_Asked(kind, time.monotonic(), self._round, True))

    def close(self) -> None:
        """Leave. This rank starts no further step, and no agreement of the others waits for it.

        Requests made before are still proposed. Returns within ``LEAVE_S`` even when another rank is dead.
        """
        self._leaving = True  # first: a watcher that is woken must see it
        self._handed_out.set()
        self._asked.put(None)
        deadline = time.monotonic() + LEAVE_S
        # The proposer first: it wakes the watcher.
        for thread in reversed(self._threads):
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            log.warning("rank %d left while an agreement was open; the other ranks may wait for it", self._rank)

    def _await_decision(self, n: int) -> str | None:
        """Wait while the gate is closed, and hand out the kind when the agreed step is reached."""
        self._decided.wait()
        if self._failure is not None:
            raise ToolkitError(
                f"rank {self._rank}, step {n}: the store over which the ranks agree is gone ({self._failure}); "
                "look at the rank or supervisor that hosts it"
            ) from self._failure
        kind, step = self._agreed
        if n < step:
            return None
        if kind == STOP:
            self._stopped = True  # and the gate stays closed
        else:
            # Get ready for the next round. The watcher enters it only when ``_handed_out`` is set.
            self._started = n - 1  # the caller asks for step n again; until then it has not started
            self._round += 1
            self.pending = None
            self._decided.clear()
            self._closed = False
            if self._failure is not None:  # the other thread failed meanwhile, and the lines above undid what it set
                self._closed = True
                self._decided.set()
        self._handed_out.set()
        return kind

    # ------------------------------------------------------------------------------------------- the watcher thread

    def _watch(self, store: Transport) -> None:
        try:
            keys = Round(self._prefix, 0)
            while self._take_part(store, keys):
                keys = keys.next()
        except Exception as error:
            self._fail(error)

    def _take_part(self, store: Transport, keys: Round) -> bool:
        """Take part in one round; False when it was this rank's last."""
        # Leaving is an acknowledgement, too: see the docstring of toolkit/ranks/agreement/__init__.py.
        called = self._await_call(store, keys.call(self._rank))
        if called is None:
            self._acknowledge(store, keys, left=True)
            return False
        kind, by = called
        # The order matters: close the gate, then read the step and acknowledge.
        self._shut(kind, by, keys)
        self._acknowledge(store, keys, left=False)
        while not store.wait(keys.decision, DECISION_S):
            pass
        self._agreed = kind, int(store.get([keys.decision])[0])
        self._decided.set()
        self._handed_out.wait()
        self._tidy(store, keys)
        return bool(kind != STOP)

    def _await_call(self, store: Transport, key: str) -> tuple[str, str] | None:
        """Wait until this rank is called; None when it leaves first."""
        while True:
            while not (self._leaving or store.wait(key, IDLE_S)):
                pass
            if self._leaving:
                return None
            called = parse_proposal(store.get([key])[0])
            if called is not None:
                return called
            log.warning("the store's key %s is not one of our calls: removed", key)
            store.delete(key)

    def _shut(self, kind: str, by: str, keys: Round) -> None:
        log.log(logging.INFO if self._rank == 0 else logging.DEBUG, "%s asks all ranks for %r", by, kind)
        self._asked.put(_Asked(kind, time.monotonic(), keys.number, False))  # the other thread watches the time
        self.pending = kind
        self._closed = True

    def _tidy(self, store: Transport, keys: Round) -> None:
        """Delete this rank's keys: an acknowledgement left after a decision means that it is not at the boundary."""
        self._handed_out.clear()  # a close() that this undoes is seen at the start of the next round
        store.delete(keys.ack(self._rank))
        store.delete(keys.call(self._rank))

    def _acknowledge(self, store: Transport, keys: Round, left: bool) -> None:
        """Publish the last step started. The gate is closed by now, or no step is started any more."""
        acknowledge(store, keys, self._world_size, self._rank, Ack(self._started, left))

    def _fail(self, error: Exception) -> None:
        """Note that the store is gone. The main thread learns it at the next boundary instead of waiting."""
        log.log(logging.DEBUG if self._leaving else logging.WARNING, "the agreement's store is gone: %s", error)
        self._failure = error
        self._closed = True
        self._decided.set()

    # --------------------------------------------------------------------------------------- the proposer thread

    def _propose(self, store: Transport) -> None:
        """Propose what is asked for and watch the time until it is handed out. At the end, wake the watcher."""
        waiting: list[_Asked] = []
        while True:
            with contextlib.suppress(queue.Empty):
                asked = self._asked.get(timeout=_patience_s(waiting, self._force_after_s))
                if asked is None:
                    break
                waiting.append(self._proposed(store, asked) if asked.propose else asked)
            waiting = self._report_hangs(store, waiting)
        with contextlib.suppress(Exception):  # without a store the watcher has ended
            # A claim, not a write: a proposal that the watcher is about to read must stay.
            store.claim(Round(self._prefix, self._round).call(self._rank), "leave")

    def _proposed(self, store: Transport, asked: _Asked) -> _Asked:
        """Propose the kind. Return ``asked`` with the number of the round that serves it."""
        by = f"rank {self._rank}"
        try:
            number = propose(store, self._world_size, asked.kind, by=by, prefix=self._prefix, since=asked.round)
        except Exception as error:
            self._fail(error)
            return asked
        return asked._replace(round=number)

    def _report_hangs(self, store: Transport, waiting: Sequence[_Asked]) -> list[_Asked]:
        """Call ``on_hang`` for each overdue kind, and return the requests that are still in time."""
        if self._force_after_s is None or self._stopped:
            return []
        now = time.monotonic()
        waiting = [asked for asked in waiting if asked.round >= self._round]  # the others were handed out
        overdue = {asked.kind: asked for asked in reversed(waiting) if now - asked.since >= self._force_after_s}
        for asked in overdue.values():
            missing = find_missing(store, Round(self._prefix, self._round), self._rank, self._world_size, asked.kind)
            self._on_hang(StalledRequest(asked.kind, now - asked.since, *missing))
        return [asked for asked in waiting if asked.kind not in overdue]


def _patience_s(waiting: Sequence[_Asked], force_after_s: float | None) -> float | None:
    """Return the seconds until the first of ``waiting`` is overdue; None if none ever is."""
    if force_after_s is None or not waiting:
        return None
    return max(0.0, min(asked.since for asked in waiting) + force_after_s - time.monotonic())
