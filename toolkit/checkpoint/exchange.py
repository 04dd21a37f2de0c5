"""A conversation between rank 0 and the other ranks over a key-value store, and what they find out by it at a save.

A save or a load is one conversation. It uses no collective: a collective next to the training's own hangs as soon as
two ranks order them differently, and a save that lost a rank could not say which. A save proves by it that ranks hold
equal values, by sums of their bits. Replicas that differ are an error of the job, or of a node, that no later save
repairs.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch

from toolkit.base.errors import CheckpointError, SaveGivenUpError, UnsavableStateError, listing
from toolkit.checkpoint.tensors import as_bytes, check_plain
from toolkit.devices import page_locked
from toolkit.ranks.state import Json, Replicated, State

#: Seconds between two checks of a rank that waits: at first, at most, and at most with very many ranks.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _LONGEST_OF_ALL_S = 0.001, 0.1, 10.0
#: Checks of all waiting ranks together. One takes the store 15 microseconds, and it has one core.
_LOOKS_A_SECOND = 5000


#: Where a rank notes in the store, with its number, that it still reads what others wait for.
_BUSY = "checkpoint/busy/"


class KeyValueStore(Protocol):
    """The calls needed of a store; `torch.distributed.Store` has them."""

    def set(self, key: str, value: str, /) -> None:
        """Make `value` visible to every rank."""

    def get(self, key: str, /) -> bytes:
        """Return the value of a key that is there."""

    def check(self, keys: list[str], /) -> bool:
        """True if all keys are there. It does not wait."""

    def delete_key(self, key: str, /) -> bool:
        """Remove a key. Return True if it was there."""


def note_busy(kv: KeyValueStore | None, rank: int) -> None:
    """Have the others wait on: this rank still reads what they wait for."""
    if kv is not None:
        kv.set(f"{_BUSY}{rank}", str(time.monotonic()))


class Exchange:
    """One conversation. With `world_size` 1 no message is sent and `kv` may be None.

    `topic` and `number` give the keys. All ranks must pass the same ones, and no earlier conversation in this store may
    have used them. A waiting rank polls instead of blocking in the store, whose client serves one call at a time:
    progress reports and stop requests continue, signal handlers run, and a save can be given up. The more ranks wait,
    the less often each polls.
    """

    def __init__(
        self,
        kv: KeyValueStore | None,
        *,
        rank: int,
        world_size: int,
        topic: str,
        number: int,
        timeout_s: float,
    ) -> None:
        assert kv is not None or world_size == 1
        self._kv = kv
        self._rank = rank
        self._others = range(1, world_size)
        self._topic = topic
        self._number = number
        self._timeout_s = timeout_s
        self._noted_s = time.monotonic()
        #: The others wait for rank 0 all at once; rank 0 waits for one after the other.
        waiting = 1 if rank == 0 else world_size
        longest_s = min(_LONGEST_OF_ALL_S, max(_LONGEST_PAUSE_S, waiting / _LOOKS_A_SECOND))
        self._first_pause_s, self._longest_pause_s = _FIRST_PAUSE_S * longest_s / _LONGEST_PAUSE_S, longest_s
        self._told = itertools.count()
        self._round = itertools.count()
        self._has_reported = False
        #: What those that are waited for had noted of being busy at half the time, perhaps in an earlier conversation.
        self._notes: dict[int, bytes] = {}

    def note_busy(self) -> None:
        """Have the others wait on while this rank reads. It may be called for each tensor."""
        if time.monotonic() - self._noted_s > self._timeout_s / 10:
            self._noted_s = time.monotonic()
            note_busy(self._kv, self._rank)

    def tell(self, message: Mapping[str, Any]) -> None:
        """Send a message to all other ranks. Only rank 0 calls this."""
        if self._kv and self._others:
            self._kv.set(self._key(f"told/{next(self._told)}"), json.dumps(message))

    def listen(self) -> dict[str, Any]:
        """Return the next message of rank 0. Only the others call this.

        Raises CheckpointError if the message is an error, or none comes in time. The others wait twice as long as rank
        0, which knows which rank is missing and says so. After a report they wait without end: rank 0 may still commit,
        and the outcome must be the same on all. The watchdog ends an attempt in which rank 0 hangs.
        """
        key = self._key(f"told/{next(self._told)}")
        deadline = math.inf if self._has_reported else time.monotonic() + 2 * self._timeout_s
        message = self._await(key, 0, deadline)
        if message is None:
            raise CheckpointError(
                f"rank {self._rank} received nothing about its checkpoint from rank 0 for {2 * self._timeout_s:g} s; "
                "look for the failure in rank 0's log"
            )
        if "error" in message:
            raise _kind([message])(message["error"])
        return message

    def report(self, message: Mapping[str, Any]) -> None:
        """Answer rank 0. Only the others call this. The key `error` in a message makes rank 0's `gather` fail."""
        assert self._kv
        self._kv.set(self._key(f"reports/{next(self._round)}/{self._rank}"), json.dumps(message))
        self._has_reported = True

    def gather(self) -> dict[int, dict[str, Any]]:
        """Return the reports to rank 0. Raises CheckpointError that names the ranks that failed or did not answer."""
        number, deadline, self._notes = next(self._round), time.monotonic() + self._timeout_s, {}
        keys = {rank: self._key(f"reports/{number}/{rank}") for rank in self._others}
        reports: dict[int, dict[str, Any]] = {}
        for rank, key in keys.items():
            message = self._await(key, rank, deadline)
            if message is not None:
                reports[rank] = message
        # The reports are read, and all ranks are in this conversation: delete the older keys where the store can. Other
        # stores keep a few hundred bytes for each save.
        if self._kv is not None:
            for key in keys.values():
                with contextlib.suppress(NotImplementedError, RuntimeError):
                    self._kv.delete_key(key)
            told = (self._key(f"told/{i}", self._number - 1) for i in itertools.count())
            with contextlib.suppress(NotImplementedError, RuntimeError):
                while self._kv.delete_key(next(told)):
                    pass
        troubles = [str(message["error"]) for message in reports.values() if "error" in message]
        silent = [str(rank) for rank in self._others if rank not in reports]
        if silent:
            troubles.append(f"no word within {self._timeout_s:g} s from rank {', '.join(silent)}: see their logs")
        if troubles:
            raise _kind(reports.values())("; ".join(troubles))
        return reports

    def _await(self, key: str, rank: int, deadline: float) -> dict[str, Any] | None:
        """Return the message of `rank` under `key`; None if it is not there by `deadline`. The store is asked once.

        A rank that notes meanwhile that it is busy has as long again.
        """
        assert self._kv
        pause_s = self._first_pause_s
        while not self._kv.check([key]):
            now = time.monotonic()
            if not self._notes and now > deadline - self._timeout_s / 2:
                self._notes = {each: self._note_of(each) for each in ((0,) if self._rank else self._others)}
            if now > deadline:
                before, self._notes[rank] = self._notes[rank], self._note_of(rank)
                if self._notes[rank] == before:
                    return None
                deadline = now + self._timeout_s
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, self._longest_pause_s)
        try:
            message = json.loads(self._kv.get(key))
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise CheckpointError(f"the store's key {key} is not a message of a rank: another program writes there")
        return message

    def _note_of(self, rank: int) -> bytes:
        assert self._kv
        key = f"{_BUSY}{rank}"
        return self._kv.get(key) if self._kv.check([key]) else b""

    def _key(self, name: str, number: int | None = None) -> str:
        return f"{self._topic}/{self._number if number is None else number}/{name}"


@contextlib.contextmanager
def failures_told(talk: Exchange, doing: str) -> Iterator[None]:
    """Tell all ranks of any failure inside, and raise it here as the same CheckpointError. Only rank 0 uses this."""
    try:
        yield
    except Exception as error:
        message = failure(error, f"{doing}: {describe(error)}")
        talk.tell(message)
        raise _kind([message])(message["error"]) from error


def failure(error: Exception, text: str) -> dict[str, Any]:
    """Return the message about a failure, with which it is raised on another rank."""
    return {"error": text, "kind": type(error).__name__}


def _kind(messages: Iterable[Mapping[str, Any]]) -> type[CheckpointError]:
    kinds = {message.get("kind") for message in messages}
    known = (UnsavableStateError, SaveGivenUpError)
    return next((kind for kind in known if kind.__name__ in kinds), CheckpointError)


def describe(error: Exception) -> str:
    """Return one line about the error. The toolkit's own messages need no type name, others do."""
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


class ReplicaSums:
    """The values that a rank holds as all ranks do, as they were when this was made."""

    def __init__(self, state: State) -> None:
        values = {name: entry.value for name, entry in sorted(state.items()) if isinstance(entry, Replicated)}
        self._sums: dict[str, int] = dict.fromkeys(values, 0)
        found: dict[torch.device, dict[str, torch.Tensor]] = {}
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                found.setdefault(value.device, {})[name] = _sum_of_bits(name, value)
            else:
                self._sums[name] = _digest(value)
        # On a GPU all this is only enqueued. Another thread may read it, whose own stream would not wait for it.
        self._copies = [
            ([*sums], torch.stack([*sums.values()]).to("cpu", non_blocking=True)) for sums in found.values()
        ]
        self._wait = page_locked.stream_waiter() if any(device.type != "cpu" for device in found) else lambda: None

    def sums(self) -> Mapping[str, int]:
        """Return a number for each value. Waits for the GPU, if the values are there."""
        if self._copies:
            self._wait()
        while self._copies:
            names, copy = self._copies.pop()
            self._sums |= zip(names, copy.tolist(), strict=True)
        return self._sums

    def digest(self) -> int:
        """Return one number for all names and values."""
        return _digest(self.sums())


def refuse_unequal(talk: Exchange, own: ReplicaSums, digests: Mapping[int, int]) -> None:
    """Raise UnsavableStateError if the ranks' ``digests`` are not rank 0's. Ask them for their sums then."""
    expected = own.digest()
    unequal = [rank for rank, digest in digests.items() if digest != expected]
    if not unequal:
        return
    talk.tell({"sums": True})
    refuse_differing(own.sums(), talk.gather()[unequal[0]]["sums"], unequal[0])


def refuse_differing(ours: Mapping[str, int], theirs: Mapping[str, int], rank: int) -> None:
    """Raise UnsavableStateError, naming the values of ``rank`` that differ from rank 0's, ``ours``."""
    # Compare the names first.
    if ours.keys() != theirs.keys():
        raise UnsavableStateError(
            f"rank {rank} declares other replicated values than rank 0; both must build the same model"
        )
    different = [name for name in ours if ours[name] != theirs[name]]
    if different:
        raise UnsavableStateError(
            f"{listing(different)} declared as replicated, but rank {rank} and rank 0 hold different values; "
            "the replicas have drifted apart, or the value is per rank"
        )


def _sum_of_bits(name: str, value: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's 8-byte words in C order, modulo 2^64, as a tensor that may still be computed."""
    check_plain(name, value)
    content = as_bytes(value.detach().resolve_conj().resolve_neg().contiguous())
    words, rest = content[: content.numel() // 8 * 8], content[content.numel() // 8 * 8 :]
    if words.storage_offset() % 8:  # torch reads words only where they are aligned
        words = words.clone()
    total = words.view(torch.int64).sum()
    return total + rest.sum() if rest.numel() else total


def _digest(value: Json) -> int:
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())
