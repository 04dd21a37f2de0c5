"""The store over which the gates of one process agree, without torch's."""

import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence


class MemoryStore:
    """A store for ranks that are threads of one process: the client of every rank."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._waiting: defaultdict[str, list[threading.Event]] = defaultdict(list)
        self._lock = threading.Lock()

    def set(self, values: Mapping[str, str]) -> None:
        """Write all values. See :class:`~toolkit.ranks.agreement.Transport` for this and the other methods."""
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
