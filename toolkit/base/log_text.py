"""Reads the end of a log as text, whatever its size and whatever bytes it holds."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import BinaryIO

from toolkit.base import reading

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
    with reading.open_file(path) as file:
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
