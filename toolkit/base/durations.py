"""Durations as text: for people, and in Slurm's notation."""

from __future__ import annotations

import math
import re

_UNITS = re.compile(r"(?:([0-9]+) *d)? *(?:([0-9]+) *h)? *(?:([0-9]+) *m(?:in)?)?")
_SLURMS = re.compile(r"(?:([0-9]+)-)?([0-9]+)(?::([0-9]+))?(?::([0-9]+))?")


def in_units(seconds: float) -> str:
    """Return the two largest units of a time: ``1 h 12 min``, ``9 s``. Less than 0, by clocks that differ, is 0."""
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    units = [(days, "d"), (hours, "h"), (minutes, "min"), (rest, "s")]
    while len(units) > 1 and not units[0][0]:
        del units[0]
    return " ".join(f"{count} {unit}" for count, unit in units[:2] if count) or "0 s"


def in_one_unit(seconds: float) -> str:
    """Return a time in seconds below two minutes, else in minutes: ``90 s``, ``12 min``. Less than 0 is 0."""
    return f"{max(0.0, seconds):.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def as_clock(seconds: float) -> str:
    """Return a time as a clock shows it: ``1:05:09``, ``5:09``. Less than 0 is 0."""
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def parse_slurms(text: str | None) -> float | None:
    """Return the seconds of ``30`` (minutes), ``03:04``, ``02:03:04``, ``1-02``, ``1-02:03`` or ``1-02:03:04``.

    None for what is no time, such as UNLIMITED and Partition_Limit. See sbatch(1), ``--time``.
    """
    match = _SLURMS.fullmatch(text or "")
    if match is None:
        return None
    days, *parts = (int(part or 0) for part in match.groups())
    # With days, or with three parts, the first part is hours, else minutes.
    if match[1] is None and match[4] is None:
        parts = [0, *parts[:2]]
    hours, minutes, seconds = parts
    return float(((24 * days + hours) * 60 + minutes) * 60 + seconds)


def parse_minutes(text: str) -> int | None:
    """Return the minutes of ``4h``, ``90min`` or ``1d12h``, or of a time in Slurm's notation: ``2:00:00``, ``1-12``.

    Seconds are rounded up. None for anything else, and for ``00:30``: Slurm reads it as minutes and seconds, and many
    mean hours and minutes.
    """
    if text and (match := _UNITS.fullmatch(text)):
        days, hours, minutes = (int(part or 0) for part in match.groups())
        return (24 * days + hours) * 60 + minutes
    seconds = None if re.fullmatch(r"[0-9]+:[0-9]+", text) else parse_slurms(text)
    return None if seconds is None else math.ceil(seconds / 60)
