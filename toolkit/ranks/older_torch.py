"""Calls that differ between torch 2.6 and the newest: one function for each, which works with all of them.

What an older torch lacks altogether is refused by its key, see `toolkit.base.torch_version`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import Store, TCPStore, distributed_c10d

#: Before torch 2.8 the newer server of a store takes no socket that listens already. The older one does, and wakes no
#: client that waits for a key when another sets it by compare_set().
LIBUV = hasattr(TCPStore, "clone")  # came with 2.8, too


def supported_options(function: Callable[..., Any], **options: Any) -> dict[str, Any]:
    """Return those of the ``options`` that ``function`` has. It is for options that change no result."""
    there = inspect.signature(function).parameters
    return {name: value for name, value in options.items() if name in there}


def serve_store(host: str, port: int, listening: int, timeout: timedelta, world_size: int | None = None) -> TCPStore:
    """Return a store that serves the socket ``listening``, a descriptor that it takes over."""
    how: dict[str, Any] = {"wait_for_workers": False, "master_listen_fd": listening, "use_libuv": LIBUV}
    return TCPStore(host, port, world_size, is_master=True, timeout=timeout, **how)


def clone(store: Store) -> Store:
    """Return another client of the same store, with a connection of its own."""
    if isinstance(store, TCPStore) and not LIBUV:
        timeout: timedelta = store.timeout  # type: ignore[attr-defined]  # torch's stub leaves it out
        return TCPStore(store.host, store.port, is_master=False, timeout=timeout, wait_for_workers=False)
    return store.clone()


def set_timeout(timeout: timedelta, group: dist.ProcessGroup) -> None:
    (getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout)(timeout, group)  # torch < 2.15
