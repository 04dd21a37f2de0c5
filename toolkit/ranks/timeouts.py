"""The time limits of process groups, shorter once training has begun.

Before the first step ranks import, compile and look for kernels, each at its own pace. After it, a rank that waits long
in a collective waits for a rank that hangs. The watchdog's limits (hang/watchdog.py) are below these, since it can
name the rank that hangs. Without a supervisor only these limits notice.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

#: Share of ``dist.timeout_s``; above the watchdog's share.
STEP_SHARE = 0.7


def adopt(groups: Iterable[dist.ProcessGroup], timeout: timedelta) -> None:
    """Give ``groups`` the session's limit; torch has opened them with its own (a mesh's groups)."""
    for group in groups:
        if any(_timeout(group, device) is not None for device in _devices(group)):
            _set(group, timeout)


def tighten(timeout: timedelta) -> None:
    """Give every group that was opened with ``timeout`` the limit for steps. Groups with another limit keep theirs."""
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
    """Return the group's limit on ``device``; None if the backend has none, as over MPI."""
    options = getattr(group._get_backend(device), "options", None)
    return getattr(options, "_timeout", None)
