"""Reads the stacks of a process that faulthandler has written."""

from __future__ import annotations

import re
from collections.abc import Sequence
from traceback import FrameSummary
from typing import TypeAlias

Stack: TypeAlias = Sequence[FrameSummary]  #: innermost frame first

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x\w+", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)


def main_stack(text: str) -> Stack:
    """Return the main thread's stack in faulthandler's output: the last that ``threading`` has not started."""
    main: Stack = []
    for thread in _THREAD.split(text)[1:]:
        frames = [FrameSummary(file, int(line), name) for file, line, name in _FRAME.findall(thread)]
        if frames and frames[-1].name != "_bootstrap":
            main = frames
    return main
