"""Awaiting a condition instead of sleeping."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
#: Limits are for an idle machine; a busy one gets so many times as long, and what waits in vain takes that much longer.
PATIENCE = 3


def wait_for(condition: Callable[[], T], timeout_s: float, what: str) -> T:
    """The first true value of ``condition``; AssertionError that says ``what`` was awaited."""
    deadline = time.monotonic() + PATIENCE * timeout_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"{what}: not after {PATIENCE * timeout_s:.0f} s"
        time.sleep(0.05)


def processes_with(text: str) -> dict[int, str]:
    """Living processes of this machine whose environment holds ``text``, by pid, with their command lines."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if text.encode() not in (folder / "environ").read_bytes():
                continue
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it ended while we looked
            continue
        if command:  # a zombie has none
            found[int(folder.name)] = command
    return found


def nobody_left(env: dict[str, str]) -> bool:
    """True if no process has the runs folder of this environment."""
    return not processes_with(f"TOOLKIT_RUNS={env['TOOLKIT_RUNS']}")
