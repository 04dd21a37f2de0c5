"""What an agreement needs of the store, and a store for ranks that are threads."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Protocol


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


class MemoryStore:
    """A store for ranks that are threads of one process: the client of every rank. For your tests too."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._waiting: defaultdict[str, list[threading.Event]] = defaultdict(list)
        self._lock = threading.Lock()

    def set(self, values: Mapping[str, str]) -> None:
        """Write all values. See :class:`Transport` for this and the other methods."""
        with self._lock:
            self._put(values)

    def _put(self, values: Mapping[str, str]) -> None:
        self._values.update(values)
        for key in values:
            for event in self._waiting.pop(key, ()):
                event.set()

    def get(self, keys: Sequence[str]) -> list[str]:
        with self._lock:
            return [self._values[key] for key in keys]

    def exists(self, key: str) -> bool:
        with self._lock:
            return key in self._values

    def claim(self, key: str, value: str) -> str:
        with self._lock:
            if key not in self._values:
                self._put({key: value})
            return self._values[key]

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            total = int(self._values.get(key, "0")) + amount
            self._put({key: str(total)})
            return total

    def wait(self, key: str, timeout_s: float) -> bool:
        event = threading.Event()
        with self._lock:
            if key in self._values:
                return True
            self._waiting[key].append(event)
        return event.wait(timeout_s)

    def delete(self, key: str) -> None:
        with self._lock:
            self._values.pop(key, None)

    def keys(self) -> list[str]:
        """Return the keys, sorted."""
        with self._lock:
            return sorted(self._values)
