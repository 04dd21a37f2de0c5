"""Reduces curves of a million points to a few hundred.

The first, least, greatest and last value of each piece of a curve are kept. A line through these four touches the same
pixels as one through all points, so no spike is lost (M4, Jugel et al., "M4: A Visualization-Oriented Time Series Data
Aggregation", VLDB 2014).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
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

    def points(self) -> list[Point]:
        """Return the points in the order of their steps, each once."""
        return sorted({self.first, self.least, self.greatest, self.last})


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
        if len(self.pieces) > 2 * PIECES:
            self.halve()

    def halve(self) -> None:
        """Join the pieces in pairs, until there are few enough."""
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
            stroke += piece.points()
            if piece.is_broken:
                yield stroke
                stroke = []
        if stroke:
            yield stroke

    def summary(self) -> dict[str, Any]:
        """Return the exact first, last, least and greatest value, each with its step."""
        pieces = list(self.pieces.values())
        if not pieces:
            return {"count": self.count, "not_finite": self.not_finite}
        least = min((piece.least for piece in pieces), key=lambda point: point[1])
        greatest = max((piece.greatest for piece in pieces), key=lambda point: point[1])
        ends = {"first": pieces[0].first, "last": pieces[-1].last}
        return {"count": self.count, "not_finite": self.not_finite, **ends, "least": least, "greatest": greatest}


def read_curves(path: Path, damage: list[str]) -> dict[str, Curve]:
    """Return the curves in ``metrics.jsonl`` by tag, those that readers look for first."""
    curves: dict[str, Curve] = {}
    for line in lines.read(path, damage):
        for tag, value in line.values.items():
            curve = curves.get(tag)
            if curve is None:
                curve = curves[tag] = Curve()
            curve.add(line.step, value)
    return dict(sorted(curves.items(), key=lambda item: _place(item[0])))


#: Figures of the run itself come last. Some are one for each rank.
_ASIDE = ("world", "world_own_step_s", "run", "goodput", "usage")


def is_aside(tag: str) -> bool:
    """True for a figure of the run itself, not of what is learnt."""
    return tag.split("/")[0] in _ASIDE


def _place(tag: str) -> tuple[int, str]:
    group = tag.split("/")[0]
    if tag == "train/loss":
        return 0, tag
    if is_aside(tag):
        return 4 + _ASIDE.index(group), tag
    return {"eval": 1, "train": 2}.get(group, 3), tag
