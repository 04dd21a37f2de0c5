"""Reduces curves of a million points to a few hundred.

The first, least, greatest and last value of each piece of a curve are kept. A line through these four touches the same
pixels as one through all points, so no spike is lost (M4, Jugel et al., "M4: A Visualization-Oriented Time Series Data
Aggregation", VLDB 2014).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from toolkit.metrics import lines

#: Step and value.
Point: TypeAlias = tuple[int, float]
#: A curve has at most twice as many pieces.
PIECES = 128


class CurvePiece:
    """The four points that are kept of some neighbouring ones."""

    __slots__ = ("first", "greatest", "is_broken", "last", "least")

    def __init__(self, point: Point) -> None:
        self.first = self.least = self.greatest = self.last = point
        self.is_broken = False  #: a value after it was not finite: the line stops here

    def add(self, point: Point) -> None:
        self.last = point
        if point[1] < self.least[1]:
            self.least = point
        elif point[1] > self.greatest[1]:
            self.greatest = point

    def join(self, later: CurvePiece) -> None:
        """Take in the next piece."""
        self.last, self.is_broken = later.last, self.is_broken or later.is_broken
        self.least = min(self.least, later.least, key=lambda point: point[1])
        self.greatest = max(self.greatest, later.greatest, key=lambda point: point[1])


@dataclass
class Curve:
    """One metric of one run."""

    count: int = 0  #: of all values
    not_finite: int = 0
    first_bad: int | None = None  #: the step of the first value that was not finite
    pieces: dict[int, CurvePiece] = field(default_factory=dict)
    width: int = 1  #: the steps of a piece, a power of two

    def add(self, step: int, value: float) -> None:
        """Add a point; steps come in rising order."""
        self.count += 1
        if not math.isfinite(value):
            self.not_finite += 1
            self.first_bad = step if self.first_bad is None else self.first_bad
            if self.pieces:
                self.pieces[next(reversed(self.pieces))].is_broken = True
            return
        piece = self.pieces.get(step // self.width)
        if piece is not None:
            piece.add((step, value))
            return
        self.pieces[step // self.width] = CurvePiece((step, value))
        if len(self.pieces) <= 2 * PIECES:
            return
        # Join the pieces in pairs, until there are few enough.
        while len(self.pieces) > PIECES:
            self.width *= 2
            joined: dict[int, CurvePiece] = {}
            for number, piece in self.pieces.items():
                if number // 2 in joined:
                    joined[number // 2].join(piece)
                else:
                    joined[number // 2] = piece
            self.pieces = joined

    def strokes(self) -> Iterator[list[Point]]:
        """Yield the unbroken parts of the line."""
        stroke: list[Point] = []
        for piece in self.pieces.values():
            stroke += sorted({piece.first, piece.least, piece.greatest, piece.last})
            if piece.is_broken:
                yield stroke
                stroke = []
        if stroke:
            yield stroke

    def summary(self) -> dict[str, Any]:
        """Return the exact first, last, least and greatest value, each with its step."""
        pieces = list(self.pieces.values())
        found: dict[str, Any] = {"count": self.count, "not_finite": self.not_finite}
        if pieces:
            found |= {"first": pieces[0].first, "last": pieces[-1].last}
            found["least"] = min((piece.least for piece in pieces), key=lambda point: point[1])
            found["greatest"] = max((piece.greatest for piece in pieces), key=lambda point: point[1])
        return found


def read_curves(path: Path) -> dict[str, Curve]:
    """Return the curves in ``metrics.jsonl`` by tag, those that readers look for first."""
    curves: dict[str, Curve] = {}
    for line in lines.read(path):
        for tag, value in line.values.items():
            curve = curves.get(tag)
            if curve is None:
                curve = curves[tag] = Curve()
            curve.add(line.step, value)

    def place(tag: str) -> tuple[int, str]:
        group = "" if tag == "train/loss" else tag.split("/")[0]
        return (_ORDER.index(group) if group in _ORDER else _ORDER.index("other")), tag

    return {tag: curves[tag] for tag in sorted(curves, key=place)}


#: Figures of the run itself come last. Some are one for each rank.
_ASIDE = ("world", "world_own_step_s", "run", "goodput", "usage")
#: The order of the groups of metrics, behind train/loss.
_ORDER = ("", "eval", "train", "other", *_ASIDE)


def is_aside(tag: str) -> bool:
    """True for a figure of the run itself, not of what is learnt."""
    return tag.split("/")[0] in _ASIDE


WIDTH, HEIGHT = 420, 190
LEFT, RIGHT, TOP, BOTTOM = 58, 10, 8, 24
#: What the axis of a chart of usage reaches at least, in CPUs, GiB or GPUs.
LEAST_USAGE = 0.1
#: The number of colours for runs. Further runs begin again with the first.
COLOURS = 8


def scale_of(tag: str, curves: Sequence[Curve], last_step: int) -> Scale:
    """Return the scale on which all ``curves`` of a metric fit."""
    pieces = [piece for curve in curves for piece in curve.pieces.values()]
    low = min((piece.least[1] for piece in pieces), default=0.0)
    high = max((piece.greatest[1] for piece in pieces), default=1.0)
    if tag.startswith("usage/"):  # amounts: a few kilobytes would fill a chart of their own, marked 1e-06 GiB
        low, high = 0.0, max(high, LEAST_USAGE)
    return Scale(last_step, low, high)


def path(places: Sequence[tuple[int, int]]) -> str:
    """Return a line's path in tenths of a unit. Differences take a third of the bytes of absolute numbers."""
    (x, y), *rest = places
    words = [f"M{x} {y}l" if rest else f"M{x} {y}"]
    for next_x, next_y in rest:
        words.append(f"{next_x - x} {next_y - y}")
        x, y = next_x, next_y
    return words[0] + " ".join(words[1:])


class Scale:
    """The place of a point in a chart."""

    def __init__(self, last_step: int, low: float, high: float) -> None:
        margin = (high - low) * 0.04 or abs(high) * 0.1 or 1.0
        self.range = low, high
        self.low, self.high = low - margin, high + margin
        self.last_step = max(last_step, 1)

    def place(self, step: int, value: float) -> tuple[int, int]:
        """Return x and y in tenths of the chart's units."""
        x = LEFT + (WIDTH - LEFT - RIGHT) * step / self.last_step
        # Each divided by itself first: the difference of two huge numbers may be infinite.
        share = (value / 2 - self.low / 2) / (self.high / 2 - self.low / 2)
        y = HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share
        return round(10 * x), round(10 * y)

    def x(self, step: int) -> float:
        return self.place(step, self.low)[0] / 10

    def y(self, value: float) -> float:
        return self.place(0, value)[1] / 10

    def strokes(self, curve: Curve) -> list[list[tuple[int, int]]]:
        """Return the places of the unbroken parts of a line."""
        return [[self.place(step, value) for step, value in stroke] for stroke in curve.strokes()]


def ticks(low: float, high: float, most: int) -> list[float]:
    """Return about ``most`` round numbers between ``low`` and ``high``."""
    span = high - low
    if not math.isfinite(span) or span <= 0:
        return [low]
    size = 10.0 ** math.floor(math.log10(span / most))
    size = next(size * times for times in (1, 2, 5, 10, 20) if span / (size * times) <= most)
    first = math.ceil(low / size)
    # From whole numbers of a tick: sums would drift.
    numbers = [(first + count) * size for count in range(most + 2)]
    return [number for number in numbers if number <= high]


def short(value: float) -> str:
    """Return a number in four digits."""
    return f"{value:.4g}"


def steps(step: int) -> str:
    """Return a step's number, shorter if it is round or large."""
    for size, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if step >= 10 * size or (step >= size and step % size == 0):
            return f"{step / size:g}{unit}"
    return str(step)
