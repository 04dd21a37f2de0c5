"""The rounds of an agreement in the store that the ranks share."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from toolkit.base import logs

#: The one kind after which no round follows.
STOP = "stop"
#: Prefix of the gate's keys in the store.
PREFIX = "toolkit/agree"
#: In a hang one rank lists for all which ranks are missing: it has this long, and names at most this number.
LIST_S = 4.0
MOST_NAMED = 50

log = logs.get(__name__)


class Transport(Protocol):
    """One client of the store that the ranks share, used by one thread. Any exception means that the store is gone."""

    def set(self, values: Mapping[str, str]) -> None:
        """Write all values."""

    def get(self, keys: Sequence[str]) -> list[str]:
        """Return the values of keys that exist."""

    def exists(self, key: str) -> bool:
        """True if the key exists."""

    def claim(self, key: str, value: str) -> str:
        """Write ``value`` unless the key exists, atomically, and return what the key holds now."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, atomically, and return the sum."""

    def wait(self, key: str, timeout_s: float) -> bool:
        """Block until the key exists; False after ``timeout_s``."""

    def delete(self, key: str) -> None:
        """Remove the key if it exists."""


@dataclass(frozen=True)
class Round:
    """The keys of one round."""

    prefix: str
    number: int

    @property
    def proposal(self) -> str:
        return f"{self.prefix}/{self.number}/proposal"

    @property
    def count(self) -> str:
        return f"{self.prefix}/{self.number}/count"

    @property
    def decision(self) -> str:
        return f"{self.prefix}/{self.number}/decision"

    def call(self, rank: int) -> str:
        return f"{self.prefix}/{self.number}/call/{rank}"

    def ack(self, rank: int) -> str:
        return f"{self.prefix}/{self.number}/ack/{rank}"

    def lister(self, kind: str) -> str:
        """Return the key for the rank that lists the missing ranks when ``kind`` hangs."""
        return f"{self.prefix}/{self.number}/lister/{kind}"

    def missing(self, kind: str) -> str:
        """Return the key for that rank's list."""
        return f"{self.prefix}/{self.number}/missing/{kind}"

    def next(self) -> Round:
        return Round(self.prefix, self.number + 1)


class Ack(NamedTuple):
    """The last step that a rank has started, and whether it has left. -1: it has started none."""

    started: int
    left: bool


def propose(
    store: Transport, world_size: int, kind: str, *, by: str, prefix: str = PREFIX, since: int | None = None
) -> int:
    """Propose ``kind`` and return the number of the round that serves it. Ranks and others may call it.

    A round that already has the same kind serves this proposal too, from round ``since`` on (None: the first that is
    not decided). A stop serves every kind: nothing comes after it. ``by`` is the author that the ranks are told.
    """
    mine = json.dumps([kind, by])
    keys = Round(prefix, since or 0)
    # Begin at the first open round, and continue until a round takes this proposal or already serves it.
    while since is None and store.exists(keys.decision):
        keys = keys.next()
    while (winner := store.claim(keys.proposal, mine)) != mine:
        proposal = parse_proposal(winner)
        if proposal is None:
            log.warning("the store's key %s is not one of our proposals: replaced", keys.proposal)
            store.set({keys.proposal: mine})
            break
        if proposal[0] in (kind, STOP):
            return keys.number
        keys = keys.next()
    # Call the ranks only after the claim: each reads the kind from its call.
    store.set({keys.call(rank): mine for rank in range(world_size)})
    return keys.number


def parse_proposal(text: str) -> tuple[str, str] | None:
    """Return kind and author. None for a text that the toolkit has not written: the store accepts any client's."""
    try:
        kind, by = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        return None
    return (kind, by) if isinstance(kind, str) and isinstance(by, str) else None


def acknowledge(store: Transport, keys: Round, world_size: int, rank: int, ack: Ack) -> None:
    """Write the acknowledgement of ``rank``. The one that completes the count decides the step."""
    store.set({keys.ack(rank): json.dumps(ack)})
    if store.add(keys.count, 1) != world_size or not store.exists(keys.proposal):  # there is none when all ranks left
        return
    acks = [Ack(*json.loads(value)) for value in store.get([keys.ack(rank) for rank in range(world_size)])]
    # Ranks that left must count in the next round: before the decision, when no rank can be there yet.
    gone = {rank: ack for rank, ack in enumerate(acks) if ack.left}
    if gone:
        store.set({keys.next().ack(rank): json.dumps(ack) for rank, ack in gone.items()})
        store.add(keys.next().count, len(gone))
        for rank in gone:
            store.delete(keys.ack(rank))
    store.set({keys.decision: str(max(ack.started for ack in acks) + 1)})
    store.delete(keys.count)


def find_missing(
    store: Transport, keys: Round, rank: int, world_size: int, kind: str
) -> tuple[int | None, tuple[int, ...], int]:
    """Return the agreed step, at most ``MOST_NAMED`` missing ranks, and how many more there are.

    The step is None before the decision. If the store does not answer, no rank is named. All ranks want to know at
    about the same time, and the store has a key for each rank. So one rank asks for all.
    """
    try:
        if store.claim(keys.lister(kind), str(rank)) == str(rank):
            decided = store.exists(keys.decision)
            agreed = int(store.get([keys.decision])[0]) if decided else None
            # Before the decision a missing acknowledgement means "not acknowledged", after it a remaining one "not
            # reached".
            late = [other for other in range(world_size) if store.exists(keys.ack(other)) == decided]
            listed = agreed, late[:MOST_NAMED], len(late[MOST_NAMED:])
            store.set({keys.missing(kind): json.dumps(listed)})
        elif not store.wait(keys.missing(kind), LIST_S):
            return None, (), 0
        step, ranks, more = json.loads(store.get([keys.missing(kind)])[0])
        return step, tuple(map(int, ranks)), int(more)
    except Exception:
        return None, (), 0
