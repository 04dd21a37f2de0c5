"""Reads Python's tracebacks as text: the user's own frame, and the whole with the frames of libraries folded."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from toolkit.base import fsio

_FRAME = re.compile(
    r'(?m)^(?P<indent>[ \t]*)File "(?P<file>[^"\n]{1,300})", line (?P<line>\d+)(?:,? in (?P<function>[^\n]+)|$)'
)
#: Frames of libraries and of Python itself say less than the caller's own. So do those of the toolkit.
_LIBRARY = re.compile(r".*(?:site|dist)-packages/([\w.-]+)|.*/lib/python3[\w.]*/()|<()")
_PACKAGE = f"{Path(__file__).parents[1]}/"
#: The copy of the sources in a run's folder. What follows is the path in the user's project.
_COPY = re.compile(r".*/\d{8}-\d{6}-[0-9a-f]{8}/\.code/\w+/")
#: Rows that mark a part of the line above.
_MARKS = re.compile(r"[ \t]*[~^][~^ \t]*")


@dataclass(frozen=True)
class Frame:
    """One frame of a traceback."""

    file: str  #: below the project's folder where the run has a copy of it
    line: int
    function: str | None  #: None for the place of a syntax error
    library: str | None  #: the package that it is in, ``python`` for Python's own; None for the user's code

    @property
    def place(self) -> str:
        """Return ``train.py:42 in forward``."""
        file = Path(self.file).name if self.file.startswith("/") else self.file
        return f"{file}:{self.line}" + (f" in {self.function}" if self.function else "")


def _frame(match: re.Match[str]) -> Frame:
    file = match["file"]
    found = _LIBRARY.match(file)
    library = None
    if file.startswith(_PACKAGE):
        library = "toolkit"
    elif found is not None:
        library = (found[1] or "python").removesuffix(".py")
    return Frame(_COPY.sub("", file), int(match["line"]), match["function"] and match["function"].strip(), library)


def origin_frame(text: str, start: int = 0) -> str | None:
    """Return the frame from which an exception comes: the last one of the user's code, or else of all.

    ``text`` ends with the traceback, or holds the exception below it. Return None where no frame follows ``start``.
    """
    last = _last([_frame(match) for match in _FRAME.finditer(text, start)], text)
    return None if last is None else last.place


def signal_frame(text: str) -> str | None:
    """Return :func:`origin_frame` of the stack that faulthandler has printed at a deadly signal. None without one."""
    _, fatal, stacks = text.rpartition("Fatal Python error: ")
    # The thread that got the signal, if it was one of Python's; else the main thread, which comes last.
    stack = stacks.partition("Current thread ")[2] or stacks.rpartition("Thread ")[2]
    # Innermost frame last, as in a traceback.
    return origin_frame("\n".join(reversed(stack.partition("\n\n")[0].split("\n")))) if fatal else None


def source(text: str) -> str:
    """Return the line of the program at :func:`origin_frame`. Empty if the traceback does not show it."""
    frames = [(frame, part[1:]) for frame, part in _parts(text.rstrip().split("\n")) if frame is not None]
    last = _last([frame for frame, _ in frames], text)
    return next((part[0].strip() for frame, part in frames if frame is last and part), "")


#: torch's text about a process group that is open already, and names of functions that open it for a script.
_SECOND_GROUP = "initialize the default process group twice"
_OPENS_GROUP = re.compile(r"(?i)(?!__)_*(?:init|set_?up|enable).*|.*(?:init|set_?up)")


def _last(frames: Sequence[Frame], text: str) -> Frame | None:
    """Return the last frame of the user's code, or else of all; None without one."""
    own = [frame for frame in frames if frame.library is None]
    # Of a second process group the script's own call must go, and no line of the function that it calls.
    while _SECOND_GROUP in text and len(own) > 1 and _OPENS_GROUP.fullmatch(own[-1].function or ""):
        own.pop()
    return next(reversed(own or frames), None)


#: What a traceback begins with, behind a progress bar or what a logger puts before it. Those inside of an exception
#: group are left out. A syntax error in the program itself has no first line.
_HEAD = re.compile(
    r"(?m)(?P<indent>^[ \t]*|(?<!Group )(?<!\| ))(?:Original )?Traceback \(most recent call last\):$"
    r'|^[ \t]*  File "[^"\n]{1,300}", line \d+$'
)
#: What ends it: the exception, and its text. Further lines of the text count where they are indented.
_EXCEPTION = re.compile(r"(?m)^[ \t]*(?P<how>[\w.<>]+(?:: [^\n]*)?$(?:\n[ \t]+[^\n]+)*)")
#: The same, where lines of other processes may come between: names of classes only.
_CLASS = re.compile(r"(?m)^(?P<how>(?:\w+\.)*[A-Z]\w*(?:: [^\n]*)?)$")
_CHAIN = re.compile(r"\s*(?:During handling of the above exception|The above exception was the direct cause)")
#: Before the traceback of an exception that Python ignores, and in one of a helper of its own.
_IGNORED = re.compile(r"Exception ignored [^\n]*\n\Z")
_HELPER = "/multiprocessing/resource_tracker.py"


@dataclass(frozen=True)
class Raised:
    """An exception that a log shows with its traceback."""

    how: str  #: ``ValueError: no such key``
    where: str | None
    traceback: str  #: of a chain the whole
    end: int  #: its end in the text


def raised(text: str) -> Iterator[Raised]:
    """Yield the exceptions of a log by their tracebacks. Of a chain it is the last one, which left the program."""
    at, begin = 0, None
    while (head := _HEAD.search(text, at)) is not None:
        # The stack: lines that are indented more than the first one.
        inner = (head["indent"] or "") + " "
        end = head.end() + 1
        while text.startswith(inner, end) and (newline := text.find("\n", end)) >= 0:
            end = newline + 1
        following = _HEAD.search(text, end)
        limit = len(text) if following is None else following.start()
        found = _EXCEPTION.match(text, end, limit) or _CLASS.search(text, end, limit)
        at = end
        start = head.start()
        if found is None or _HELPER in text[start:end] or _IGNORED.search(text, max(0, start - 300), start):
            begin = None
            continue
        at = found.end()
        begin = head.start() if begin is None else begin
        if not _CHAIN.match(text, at):
            yield Raised(found["how"].rstrip(), origin_frame(text[head.start() : end]), text[begin:at], at)
            begin = None


def folded(text: str) -> list[str]:
    """Return the lines of a traceback with the user's frames whole, and frames of libraries in one line a group.

    Rows that only mark a part of a line are left out. A traceback without frames of the user's keeps all of them.
    """
    has_own = any(_frame(match).library is None for match in _FRAME.finditer(text))
    lines: list[str] = []
    group: list[Frame] = []
    for frame, part in (*_parts(text.rstrip().split("\n")), (None, [])):
        if frame is not None and frame.library is not None and has_own:
            group.append(frame)
            continue
        # Frames of libraries that follow each other: who they belong to, and the last of them.
        if group:
            names = ", ".join(dict.fromkeys(str(each.library) for each in group))
            count = f"{len(group)} frames" if len(group) > 1 else "1 frame"
            lines.append(f"    ... {count} of {names}, to {group[-1].place}")
            group = []
        if frame is not None:
            indent = part[0][: len(part[0]) - len(part[0].lstrip())]
            function = f", in {frame.function}" if frame.function else ""
            lines.append(f'{indent}File "{frame.file}", line {frame.line}{function}')
            part = part[1:]
        lines += [line for line in part if not _MARKS.fullmatch(line)]
    return lines


def _parts(lines: list[str]) -> Iterator[tuple[Frame | None, list[str]]]:
    """Yield each frame with its lines, those of its source among them. Other lines come one by one, without a frame."""
    at = 0
    while at < len(lines):
        match = _FRAME.match(lines[at])
        end = at + 1
        if match is not None:
            inner = match["indent"] + " "
            while end < len(lines) and lines[end].startswith(inner) and not _FRAME.match(lines[end]):
                end += 1
        yield (None if match is None else _frame(match)), lines[at:end]
        at = end


#: The bytes that are read of a log, from its end.
TAIL_BYTES = 256 << 10
#: Longer lines are cut: those that list a model's keys have megabytes.
LONGEST_LINE = 2000

#: What launchers put before a line: torch's ``[rank3]:`` and torchrun's ``[default3]:``, also behind a progress bar;
#: mpirun's ``[1,3]<stderr>:``, srun's and mpirun's ``3:``, Ray's ``(Worker pid=7, ip=10.0.0.7)``.
LABELS = re.compile(
    r"(?m)\[(?:rank|default)(?P<torch>\d+)\]:[ \t]?"
    r"|^[ \t]*(?:\[1,(?P<mpi>\d+)\]<std\w+>:|(?P<srun>\d+):(?= )|\(\w+ pid=\d+[^)\n]{0,80}\))[ \t]?"
)
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


def tail_of_file(path: Path) -> str:
    """Return the end of a log as text, whatever bytes it holds. Raises OSError."""
    with fsio.open_file(path) as file:
        return tail_of_stream(file)


def tail_of_stream(file: BinaryIO) -> str:
    """Return the last ``TAIL_BYTES`` of a file or a pipe. Of a file nothing else is read."""
    if file.seekable():
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        tail = file.read(TAIL_BYTES)
    else:
        tail = b""
        while chunk := file.read(TAIL_BYTES):
            tail = (tail + chunk)[-TAIL_BYTES:]
    return tail.decode(errors="replace")


def as_drawn(line: str) -> str:
    """Return what a terminal shows of a line at last: what follows the last carriage return, as of a progress bar."""
    return line.rstrip("\r\n").rpartition("\r")[2]


def clean(text: str) -> str:
    """Return the text in lines as a terminal would show them, the long ones cut."""
    text = _ESCAPES.sub("", text).replace("\0", "").replace("\r\n", "\n").replace("\r", "\n")
    return "\n".join(line[:LONGEST_LINE] for line in text.split("\n"))
