"""The gate's transport over torch's store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError, Store

from toolkit.ranks import older_torch

#: How long one call may take; a store that does not answer within it counts as gone.
TIMEOUT_S = 30.0
#: torch's server parses a message anew with each 4 KiB of it that arrive: 8,000 keys take 1.7 s in one message and
#: 0.04 s in pieces. More than 131,072 keys in one message end the connection.
MESSAGE_BYTES = 4000
#: In a message each text has its length in front, and a key a slash.
_TEXT_BYTES = 9


def in_pieces(items: Iterable[tuple[str, str]]) -> Iterator[dict[str, str]]:
    """Yield keys and values in pieces of at most ``MESSAGE_BYTES``, a longer item alone. For keys give empty values."""
    piece: dict[str, str] = {}
    size = 0
    for key, value in items:
        adds = len(key) + len(value.encode()) + 2 * _TEXT_BYTES
        if piece and size + adds > MESSAGE_BYTES:
            yield piece
            piece, size = {}, 0
        piece[key] = value
        size += adds
    if piece:
        yield piece


class StoreTransport:
    """A client of torch's TCPStore as a :class:`toolkit.ranks.agreement.Transport`.

    A client serializes its calls, and a waiting call holds it: nothing else may use ``store``.
    """

    def __init__(self, store: Store) -> None:
        store.set_timeout(timedelta(seconds=TIMEOUT_S))
        self._store = store

    def set(self, values: Mapping[str, str]) -> None:
        store: Any = self._store  # torch's stub leaves multi_set out
        for piece in in_pieces(values.items()):
            store.multi_set(list(piece), list(piece.values()))

    def get(self, keys: Sequence[str]) -> list[str]:
        pieces = in_pieces((key, "") for key in keys)
        return [value.decode() for piece in pieces for value in self._store.multi_get(list(piece))]

    def exists(self, key: str) -> bool:
        return self._store.check([key])

    def claim(self, key: str, value: str) -> str:
        value = self._store.compare_set(key, "", value).decode()  # an empty expectation: only if the key does not exist
        if not older_torch.LIBUV:
            self._store.append(key, "")  # type: ignore[attr-defined]  # it changes nothing and wakes who waits
        return value

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def wait(self, key: str, timeout_s: float) -> bool:
        try:
            self._store.wait([key], timedelta(seconds=timeout_s))
        except DistStoreError:  # the timeout; a lost connection is a DistNetworkError
            return False
        return True

    def delete(self, key: str) -> None:
        self._store.delete_key(key)


def connector(store: Store) -> Callable[[], StoreTransport]:
    """Return what makes clients of ``store``'s store, each with its own connection."""
    return lambda: StoreTransport(older_torch.clone(store))
