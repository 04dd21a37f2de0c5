"""The cost of each mechanism over the size of a run, simulated on this machine.

Each module here that has ``CURVES`` is found by itself. A curve measures one size after the other. It returns its
counts (calls, keys, bytes, files) as whole numbers, which are the same on every machine. Other numbers, and the seconds
beside them, are of this machine.
"""

import importlib
import pkgutil
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.bench import record


@dataclass(frozen=True)
class Curve:
    """One mechanism. ``measure`` does its work for a run of that size and returns what it counted, by name."""

    name: str
    unit: str  #: of the sizes, such as ``ranks``
    sizes: Sequence[int]
    measure: Callable[[int], Mapping[str, float]]


@dataclass(frozen=True)
class Point:
    """One size of a curve. ``cpu_s`` is that of this process and of the children that it has waited for."""

    size: int
    wall_s: float
    cpu_s: float
    counts: Mapping[str, float]

    @property
    def columns(self) -> Mapping[str, float]:
        """Return all that is known of the size, by the heads of the table."""
        return {"wall s": round(self.wall_s, 2), "CPU s": round(self.cpu_s, 2), **self.counts}


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
    names = [curve.unit, *points[0].columns]
    rows = [[f"{value:,}" for value in (p.size, *p.columns.values())] for p in points]
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (names, *rows)]
    return "\n".join([curve.name, *(f"  {line}" for line in lines)])


def rows(curve: Curve, points: Sequence[Point]) -> Iterator[dict[str, Any]]:
    """Yield the curve as rows of a file of results, one for each cell."""
    for point in points:
        size = f"{point.size:,} {curve.unit}"
        for column, value in point.columns.items():
            better = "same" if isinstance(value, int) else ""
            row = record.row(f"{curve.name}, {size}: {column}", [value], "", better=better)
            yield row | {"curve": curve.name, "sizes": curve.unit, "size": point.size, "column": column}
