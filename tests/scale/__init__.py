"""How each mechanism grows with the size of a run: one curve each, simulated on this machine.

A module here that has ``CURVES`` is found by itself. A curve measures one size after the other and returns what it
counted (calls, keys, bytes, files), which is the same on every machine; the seconds beside it are of this machine.
"""

from __future__ import annotations

import importlib
import pkgutil
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Curve:
    """One mechanism. ``measure`` does its work for a run of that size and returns what it counted, by name."""

    name: str
    unit: str  #: of the sizes, such as ``ranks``
    sizes: Sequence[int]
    measure: Callable[[int], Mapping[str, object]]


@dataclass(frozen=True)
class Point:
    """One size of a curve. ``cpu_s`` is that of this process and of the children that it has waited for."""

    size: int
    wall_s: float
    cpu_s: float
    counts: Mapping[str, object]


def curves() -> list[Curve]:
    """Those of all modules in this folder, by name."""
    modules = [importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__)]
    return sorted((curve for module in modules for curve in getattr(module, "CURVES", [])), key=lambda c: c.name)


def measured(curve: Curve, size: int) -> Point:
    """Have ``curve`` do its work once for ``size``."""
    wall_s, cpu_s = time.monotonic(), _cpu_s()
    counts = curve.measure(size)
    return Point(size, time.monotonic() - wall_s, _cpu_s() - cpu_s, counts)


def _cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def table(curve: Curve, points: Sequence[Point]) -> str:
    """The curve for a reader: a line for each size."""
    names = [curve.unit, "wall s", "CPU s", *points[0].counts]
    rows = [[f"{p.size:,}", f"{p.wall_s:.2f}", f"{p.cpu_s:.2f}", *map(_text, p.counts.values())] for p in points]
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (names, *rows)]
    return "\n".join([curve.name, *(f"  {line}" for line in lines)])


def _text(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
