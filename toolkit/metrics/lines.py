"""Reads ``metrics.jsonl`` line by line. It may have a million lines, and a running job may be writing it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from toolkit.base import fsio
from toolkit.files import records
from toolkit.files.records import COUNT, MOMENT, NUMBER
from toolkit.files.rundir import RunDir

#: More lines that cannot be read are not named one by one.
MOST_NAMED = 5


@dataclass(frozen=True)
class MetricsLine:
    """What was logged at one step."""

    step: int
    wall_time: float  #: seconds since the epoch, 0 if it is not known
    values: Mapping[str, float]  #: by tag; NaN for a value that was not finite. Histograms are left out
    end: int  #: the byte in the file after this line


def path_of(run: RunDir) -> Path:
    """Return the file of a run's metrics."""
    return run.tensorboard / "metrics.jsonl"


def read(path: Path, start: int = 0) -> Iterator[MetricsLine]:
    """Yield the lines of ``path`` from byte ``start`` on: none of a missing file, or where no line begins there.

    A line that cannot be read is left out with a warning. A last line that is still being written is left out silently.
    """
    try:
        file = fsio.open_file(path)
    except FileNotFoundError:
        return
    except OSError as error:
        records.warn_once(f"{path} cannot be read: {error.strerror or error}")
        return
    with file:
        file.seek(max(start - 1, 0))
        if start and file.read(1) != b"\n":
            return
        end, left_out = start, 0
        while raw := file.readline(fsio.MOST_BYTES):
            end += len(raw)
            if len(raw) == fsio.MOST_BYTES:
                records.warn_once(f"{path}: a line of more than {len(raw):,} bytes ends what is read")
                return
            line = _parse(raw, end)
            if line is not None:
                yield line
            # A last line without a line break is still being written.
            elif raw.endswith(b"\n") and raw.strip():
                left_out += 1
                if left_out <= MOST_NAMED:
                    text = f"{path}: the line that ends at byte {end} cannot be read and is left out"
                    records.warn_once(text + " (further ones are not named)" * (left_out == MOST_NAMED))


def _parse(raw: bytes, end: int) -> MetricsLine | None:
    """Return the line, or None of one that does not fit."""
    try:
        found = json.loads(raw)
        step, values = found.pop("step"), found
        wall_time = values.pop("wall_time", 0.0)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None
    if not COUNT.fits(step):
        return None
    numbers = {
        tag: math.nan if value is None else float(value)
        for tag, value in values.items()
        if value is None or NUMBER.fits(value)
    }
    return MetricsLine(step, float(wall_time) if MOMENT.fits(wall_time) else 0.0, numbers, end)
