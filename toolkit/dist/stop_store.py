"""The gate's transport over torch's store."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError, Store

#: How long one call may take; a store that does not answer for so long counts as gone.
TIMEOUT_S = 30.0


class StoreTransport:
    """A client of torch's TCPStore as a :class:`toolkit.dist.stop.Transport`.

    A client serialises its calls, and a waiting call holds it: nobody else may use ``store``.
    """

    def __init__(self, store: Store) -> None:
        store.set_timeout(timedelta(seconds=TIMEOUT_S))
        self._store = store

    def set(self, values: Mapping[str, str]) -> None:
        store: Any = self._store  # torch's stub leaves multi_set out
        store.multi_set(list(values), list(values.values()))

    def get(self, keys: Sequence[str]) -> list[str]:
        return [value.decode() for value in self._store.multi_get(list(keys))]

    def exists(self, key: str) -> bool:
        return self._store.check([key])

    def claim(self, key: str, value: str) -> str:
        return self._store.compare_set(key, "", value).decode()  # an empty expectation: only where there is nothing

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
    """Makes clients of the same store as ``store``'s, each with a connection of its own: what :class:`Gate` takes."""
    return lambda: StoreTransport(store.clone())
