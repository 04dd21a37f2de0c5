"""Measures the speed of a core and of the memory of this node.

The figures are compared with those of the job's other nodes. A measurement takes an eighth of a second of one core and
64 MiB: short, because imports wait for it where a node has one core. It is for nodes on which no ranks work yet. It
counts time on the processor, so other processes do not make the node seem slow.
"""

from __future__ import annotations

import ctypes
import hashlib
import time
from collections.abc import Callable

from toolkit.plugins.site.checks import Finding, ok

CORE, MEMORY = "core speed", "memory speed"
#: The checks whose figures `toolkit.plugins.site.checks.verdict` compares.
SPEEDS = (CORE, MEMORY)
#: Bytes that no cache holds, and the seconds in which each speed is measured as often as possible. The best one counts.
MEMORY_BYTES, FOR_S = 32 << 20, 0.06
HASHED_BYTES = 1 << 20


def check_speeds() -> list[Finding]:
    """Return the speed of hashing and of copying memory, both in bytes a second.

    The core's clock decides the speed of hashing.
    """
    block, source = bytes(HASHED_BYTES), bytearray(MEMORY_BYTES)
    target = (ctypes.c_char * MEMORY_BYTES)()
    origin = (ctypes.c_char * MEMORY_BYTES).from_buffer(source)
    core = HASHED_BYTES / best_s(lambda: hashlib.sha256(block))
    # A copy reads and writes each byte.
    memory = 2 * MEMORY_BYTES / best_s(lambda: ctypes.memmove(target, origin, MEMORY_BYTES))
    return [ok(CORE, f"{core / 1e6:.0f} MB/s", core), ok(MEMORY, f"{memory / 1e9:.1f} GB/s", memory)]


def best_s(work: Callable[[], object], for_s: float = FOR_S) -> float:
    """Return the shortest time on the processor that ``work`` takes, of all tries within ``for_s``."""
    end, best = time.monotonic() + for_s, float("inf")
    while time.monotonic() < end or best == float("inf"):
        began = time.thread_time()
        work()
        best = min(best, max(time.thread_time() - began, 1e-9))
    return best
