"""Calls that every rank makes at the same step. A rank that does not make one is named within seconds.

Before such a call the ranks meet over the store that they share. Without that, the collectives of one rank's call would
pair up with other ones of the rest, which ends in wrong numbers or in a crash that looks like damaged memory. A step
makes no such call, so it costs no step time.

A rank that waits for long asks the others where they are. They answer from a thread, since their training may wait in a
collective for the rank that asks.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from toolkit.base.errors import JobCodeError, ToolkitError
from toolkit.ranks import older_torch
from toolkit.ranks.agreement.gate import IDLE_S, LEAVE_S
from toolkit.ranks.agreement.torch_store import StoreTransport
from toolkit.ranks.session import Session

#: A rank that waits for this long asks the others where they are; from then on at growing intervals.
ASK_AFTER_S, ASK_AT_MOST_EVERY_S = 1.0, 30.0
#: The store is asked at intervals that grow between these while a rank waits.
_POLL_S, _SLOW_POLL_S = 0.0002, 0.2
#: A count of ranks takes this many bits of a call's sum; the number of those that have something to write is above.
_RANK_BITS = 32


class Place(NamedTuple):
    """Where a rank is: the calls it has begun, the last one of these, and the time in steps."""

    calls: int
    what: str  #: what the rank has done, as "called run.save()"
    at: int  #: twice the steps done, and one more within a step

    @property
    def step(self) -> int:
        """Return the number of steps begun."""
        return (self.at + 1) // 2


class SameCalls:
    """One rank's side. Any thread may call ``at``, which returns :attr:`Place.at`."""

    def __init__(self, session: Session, at: Callable[[], int]) -> None:
        self._session, self._at = session, at
        self._prefix = f"toolkit/calls/{session.attempt}"
        self._place = Place(0, "made no call", 0)
        self._keys: list[str] = []  #: since the last call that all ranks have made, that one's included
        self._answering: threading.Thread | None = None
        self._is_closed = False
        self._blocks = 0  #: of :meth:`main_first` that this rank is in

    def monitored_barrier(self, what: str, *, has: bool = False, advice: str = "") -> bool:
        """Wait for all ranks to make this call. Return True if any of them ``has`` something.

        ``what`` tells what this rank has done: "called run.save()". Raises JobCodeError, with the ``advice``, where
        another rank makes another call instead, or continues without it, and ToolkitError after the group's timeout.
        """
        if self._blocks:
            raise JobCodeError(
                f"rank {self._session.rank} has {what} within `with run.main_first():`, where the ranks are not "
                "together: move the call behind the block"
            )
        if self._session.world_size == 1:
            return has
        key, store = self._begin(what), self._session.store
        all_here = f"{key}/all"
        total = store.add(key, 1 + (has << _RANK_BITS))
        if total % (1 << _RANK_BITS) == self._session.world_size:
            store.set(all_here, str(total >> _RANK_BITS))
            # All ranks have left the call before.
            for old in self._keys:
                store.delete_key(old)
        else:
            self._await(all_here, range(self._session.world_size), advice)
        self._keys = [key, all_here, f"{all_here}/asks"]
        return int(store.get(all_here)) > 0

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Run the block on rank 0, then on all others. Where it raises on rank 0, the others raise ToolkitError."""
        self._begin("called run.main_first()")
        with self._session.main_first(lambda key: self._await(key, (0,), "")):
            self._blocks += 1
            try:
                yield
            finally:
                self._blocks -= 1

    def close(self) -> None:
        """End the thread that answers."""
        self._is_closed = True
        if self._answering is not None:
            with suppress(Exception):  # the store is gone, and so is the thread
                self._session.store.set(self._where(self._session.rank), "leave")
                self._answering.join(LEAVE_S)

    def _begin(self, what: str) -> str:
        """Note that this rank makes its next call, and return the call's key."""
        if self._answering is None and self._session.world_size > 1:
            client = StoreTransport(older_torch.clone(self._session.store))
            self._answering = threading.Thread(target=self._answer, args=(client,), name="toolkit-calls", daemon=True)
            self._answering.start()
        place = self._place = Place(self._place.calls + 1, what, self._at())
        return f"{self._prefix}/{place.calls}/{place.at}/{what}"

    def _await(self, key: str, others: Sequence[int], advice: str) -> None:
        """Wait for the store's ``key``, which ``others`` or one of them will set."""
        store, began, pause = self._session.store, time.monotonic(), _POLL_S
        ask_every = ASK_AFTER_S
        ask_at = began + ask_every
        is_asking: bool | None = None
        while not store.check([key]):
            time.sleep(pause)
            pause = min(1.25 * pause, _SLOW_POLL_S)
            now = time.monotonic()
            if now < ask_at:
                continue
            # Ranks that wait in the same call are many, and each answer is a key: one of them asks for all.
            if is_asking is None:
                me = str(self._session.rank)
                is_asking = store.compare_set(f"{key}/asks", "", me).decode() == me
            late_s = now - began - self._session.timeout.total_seconds()
            if is_asking:
                self._ask(key, [rank for rank in others if rank != self._session.rank], advice, late_s > 0)
            elif late_s > 2 * ASK_AT_MOST_EVERY_S:  # the one that asks has ended
                raise ToolkitError(f"rank {self._session.rank} has {self._place.what}, and other ranks have not")
            ask_every = min(2 * ask_every, ASK_AT_MOST_EVERY_S)
            ask_at = time.monotonic() + ask_every

    def _ask(self, key: str, others: Sequence[int], advice: str, is_late: bool) -> None:
        """Raise an error that names a rank of ``others`` that will not make this call, or has not for too long."""
        store = self._session.store
        for rank in others:
            store.set(self._where(rank), "?")
        time.sleep(_SLOW_POLL_S)
        answered = [rank for rank in others if store.check([self._answer_key(rank)])]
        places = {rank: Place(*json.loads(store.get(self._answer_key(rank)))) for rank in answered}
        if store.check([key]):  # it came meanwhile
            return
        mine = self._place
        for rank, place in places.items():
            is_past = place.at > mine.at if place.calls < mine.calls else place != mine
            if is_past:
                raise JobCodeError(_differs(rank, place, self._session.rank, mine, advice))
        if is_late:
            late = [rank for rank in others if rank not in places or places[rank].calls < mine.calls]
            raise ToolkitError(
                f"rank {late[0] if late else others[0]} has not {mine.what} at step {mine.step}, as rank "
                f"{self._session.rank} has, for dist.timeout_s ({self._session.timeout.total_seconds():.0f} s)"
            )

    def _answer(self, store: StoreTransport) -> None:
        """Answer other ranks that ask where this one is."""
        where = self._where(self._session.rank)
        with suppress(Exception):  # the store is gone
            while not self._is_closed:
                if not store.wait(where, IDLE_S):
                    continue
                store.delete(where)
                # The last call, and the current time in steps.
                answer = self._place._replace(at=max(self._place.at, self._at()))
                store.set({self._answer_key(self._session.rank): json.dumps(answer)})

    def _where(self, rank: int) -> str:
        return f"{self._prefix}/where/{rank}"

    def _answer_key(self, rank: int) -> str:
        return f"{self._prefix}/told/{rank}"


def _differs(rank: int, theirs: Place, me: int, mine: Place, advice: str) -> str:
    if theirs.calls < mine.calls:
        now = f"it is in step {theirs.step}" if theirs.at % 2 else f"it has ended step {theirs.step}"
    else:
        now = f"it has {theirs.what} at step {theirs.step}"
        if theirs.calls > mine.calls:
            now += f", and calls before that rank {me} has not made"
    advice = advice or "all ranks make the same calls at the same steps: look for an `if run.rank == 0:` around them"
    return f"rank {rank} has not {mine.what} at step {mine.step}, as rank {me} has: {now}; {advice}"
