"""The time limits of process groups, shorter once training has begun.

Before the first step ranks import, compile and look for kernels, each at its own pace; after it, who waits long in a
collective waits for a rank that hangs. Where no supervisor watches (see launch/watchdog.py, whose limits are below
these, since it can say who hangs), nothing else notices.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

#: Of ``dist.timeout_s``; above the watchdog's share.
STEP_SHARE = 0.7


def tighten(timeout: timedelta) -> None:
    """Give every group that was opened with ``timeout`` the limit for steps; groups with one of their own keep it."""
    set_timeout: Any = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout  # torch < 2.15
    for group in list(distributed_c10d._world.pg_map):
        if any(_timeout(group, device) == timeout for device in group._device_types):
            set_timeout(timeout * STEP_SHARE, group)


def _timeout(group: Any, device: torch.device) -> timedelta | None:
    """None where the backend knows none, as over MPI."""
    options = getattr(group._get_backend(device), "options", None)
    return getattr(options, "_timeout", None)
