"""The time limits of process groups, shorter once training has begun.

Before the first step ranks import, compile and look for kernels, each at its own pace; after it, who waits long in a
collective waits for a rank that hangs. Where no supervisor watches (see launch/watchdog.py, whose limits are below
these, since it can say who hangs), nothing else notices.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

#: Of ``dist.timeout_s``; above the watchdog's share.
STEP_SHARE = 0.7


def adopt(groups: Iterable[dist.ProcessGroup], timeout: timedelta) -> None:
    """Give ``groups``, which torch has opened with a limit of its own (a mesh's), that of the session."""
    for group in groups:
        if any(_timeout(group, device) is not None for device in _devices(group)):
            _set(group, timeout)


def tighten(timeout: timedelta) -> None:
    """Give every group that was opened with ``timeout`` the limit for steps; groups with one of their own keep it."""
    for group in list(distributed_c10d._world.pg_map):
        if any(_timeout(group, device) == timeout for device in _devices(group)):
            _set(group, timeout * STEP_SHARE)


def _set(group: dist.ProcessGroup, timeout: timedelta) -> None:
    set_timeout: Any = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout  # torch < 2.15
    set_timeout(timeout, group)


def _devices(group: Any) -> Iterable[torch.device]:
    devices: Iterable[torch.device] = group._device_types
    return devices


def _timeout(group: Any, device: torch.device) -> timedelta | None:
    """None where the backend knows none, as over MPI."""
    options = getattr(group._get_backend(device), "options", None)
    return getattr(options, "_timeout", None)
