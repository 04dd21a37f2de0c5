"""Reads the stacks of a process that faulthandler has written."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from traceback import FrameSummary
from typing import TypeAlias

Stack: TypeAlias = Sequence[FrameSummary]  #: innermost frame first

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x\w+", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_OURS = f"{Path(__file__).parents[2]}/"
_LIBRARY = re.compile(r"^<|/(?:site|dist)-packages/|/lib/python3[\d.]*/")


def main_stack(text: str) -> Stack:
    """Return the main thread's stack in faulthandler's output: the last that ``threading`` has not started."""
    main: Stack = []
    for thread in _THREAD.split(text)[1:]:
        frames = [FrameSummary(file, int(line), name) for file, line, name in _FRAME.findall(thread)]
        if frames and frames[-1].name != "_bootstrap":
            main = frames
    return main


def is_ours(stack: Stack) -> bool:
    """True if the toolkit has called the library in which the rank is, or is there itself."""
    caller = next((frame.filename for frame in stack if frame.filename.startswith(_OURS) or not _is_library(frame)), "")
    return caller.startswith(_OURS)


def program_line(stack: Stack) -> str | None:
    """Return the innermost line of the user's program as ``train.py:12``; None where there is none."""
    own = (frame for frame in stack if not frame.filename.startswith(_OURS) and not _is_library(frame))
    return next((f"{Path(frame.filename).name}:{frame.lineno}" for frame in own), None)


def _is_library(frame: FrameSummary) -> bool:
    return _LIBRARY.search(frame.filename) is not None
