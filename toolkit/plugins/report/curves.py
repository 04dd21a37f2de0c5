"""Reduces curves of a million points to a few hundred.

The first, least, greatest and last value of each piece of a curve are kept. A line through these four touches the same
pixels as one through all points, so no spike is lost (M4, Jugel et al., "M4: A Visualization-Oriented Time Series Data
Aggregation", VLDB 2014).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from toolkit.metrics import lines

#: Step and value.
Point: TypeAlias = tuple[int, float]
#: A curve has at most twice as many pieces; each of very many has fewer, so that all take at most about 100 MB.
PIECES, LEAST_PIECES, ALL_PIECES = 128, 16, 1 << 16
#: A step that is this many times as far from the one before it as any before was: values between them are missing.
GAP, LEARNT = 5, 4


class CurvePiece:
    """The four points that are kept of some neighbouring ones, and the mean of all."""

    __slots__ = ("count", "first", "greatest", "is_broken", "last", "least", "mean")

    def __init__(self, point: Point) -> None:
        self.first = self.least = self.greatest = self.last = point
        self.mean, self.count = point[1], 1
        self.is_broken = False  #: a value after it was not finite, or is missing: the line stops here

    def add(self, point: Point) -> None:
        self._weigh(point[1], 1)
        self.last = point
        if point[1] < self.least[1]:
            self.least = point
        elif point[1] > self.greatest[1]:
            self.greatest = point

    def join(self, later: CurvePiece) -> None:
        """Take in the next piece."""
        self._weigh(later.mean, later.count)
        self.last, self.is_broken = later.last, self.is_broken or later.is_broken
        self.least = min(self.least, later.least, key=lambda point: point[1])
        self.greatest = max(self.greatest, later.greatest, key=lambda point: point[1])

    def _weigh(self, mean: float, count: int) -> None:
        self.count += count
        share = count / self.count
        self.mean = (1 - share) * self.mean + share * mean  # no sum, which may be infinite


@dataclass
class Curve:
    """One metric of one run."""

    count: int = 0  #: of all values
    not_finite: int = 0
    first_bad: int | None = None  #: the step of the first value that was not finite
    pieces: dict[int, CurvePiece] = field(default_factory=dict)
    width: int = 1  #: the steps of a piece, a power of two
    last_step: int = -1
    _spacing: int = 0  #: the largest distance of two steps
    _spacings: int = 0  #: of how many that is

    def add(self, step: int, value: float, most: int = PIECES) -> None:
        """Add a point, and reduce more than twice ``most`` pieces to ``most``.

        A point at a step that is not after the last one is known, and is left out.
        """
        if step <= self.last_step:
            return
        distance, self.last_step = step - self.last_step if self.count else 0, step
        self.count += 1
        is_gap = self._spacings >= LEARNT and distance > GAP * self._spacing
        # Behind a gap the usual distance is learnt anew: from here on fewer steps may be logged.
        self._spacing, self._spacings = (0, 0) if is_gap else (max(self._spacing, distance), self._spacings + 1)
        is_finite = math.isfinite(value)
        if (is_gap or not is_finite) and self.pieces:
            self.pieces[next(reversed(self.pieces))].is_broken = True
        if not is_finite:
            self.not_finite += 1
            self.first_bad = step if self.first_bad is None else self.first_bad
            return
        piece = self.pieces.get(step // self.width)
        if piece is not None:
            piece.add((step, value))
            return
        self.pieces[step // self.width] = CurvePiece((step, value))
        if len(self.pieces) <= 2 * most:
            return
        # Join the pieces in pairs, until there are few enough.
        while len(self.pieces) > most:
            self.width *= 2
            joined: dict[int, CurvePiece] = {}
            for number, piece in self.pieces.items():
                if number // 2 in joined:
                    joined[number // 2].join(piece)
                else:
                    joined[number // 2] = piece
            self.pieces = joined

    def strokes(self, *, of_means: bool = False) -> Iterator[list[Point]]:
        """Yield the unbroken parts of the line, or of that through the mean of each piece."""
        stroke: list[Point] = []
        for piece in self.pieces.values():
            middle = (piece.first[0] + piece.last[0]) // 2
            points = {(middle, piece.mean)} if of_means else {piece.first, piece.least, piece.greatest, piece.last}
            stroke += sorted(points)
            if piece.is_broken:
                yield stroke
                stroke = []
        if stroke:
            yield stroke

    def numbers(self, *, of_means: bool = False) -> list[list[float]]:
        """Return the strokes for the page: step and value of the first point, then of each the step's distance."""
        strokes = list[list[float]]()
        for stroke in self.strokes(of_means=of_means):
            (before, first), *rest = stroke
            numbers = [before, _rounded(first)]
            for step, value in rest:
                numbers += [step - before, _rounded(value)]
                before = step
            strokes.append(numbers)
        return strokes

    def summary(self) -> dict[str, Any]:
        """Return the exact first, last, least and greatest value, each with its step."""
        pieces = list(self.pieces.values())
        found: dict[str, Any] = {"count": self.count, "not_finite": self.not_finite}
        if pieces:
            found |= {"first": pieces[0].first, "last": pieces[-1].last}
            found["least"] = min((piece.least for piece in pieces), key=lambda point: point[1])
            found["greatest"] = max((piece.greatest for piece in pieces), key=lambda point: point[1])
        return found


class CurveReader:
    """The curves in a run's ``metrics.jsonl``, which may be growing, by tag. Keeps no line in memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begin()

    def _begin(self) -> None:
        self.curves: dict[str, Curve] = {}
        self._at = self._last_at = 0  #: the end of the last line, and its begin
        self._last_step: int | None = None
        self.left_bytes = 0  #: that the last call of :meth:`read` has left for the next one

    def read(self, most_s: float = math.inf) -> dict[str, Curve]:
        """Read on for at most ``most_s`` seconds, and return the curves, those that readers look for first."""
        until = time.monotonic() + most_s
        try:
            size = self._path.stat().st_size
        except OSError:  # the warning of lines.read says why
            size = 0
        if size < self._at:
            self._begin()  # a new attempt has dropped the steps after its checkpoint
        # The last line is read again: an evaluation at the same step adds its values to that line.
        begin, expected, before = self._last_at, self._last_step, self._at
        for line in lines.read(self._path, begin):
            if expected is not None and line.step != expected:
                self._begin()
                return self.read(until - time.monotonic())
            expected = None
            self._last_at, self._last_step = begin, line.step
            begin = self._at = line.end
            most = max(LEAST_PIECES, min(PIECES, ALL_PIECES // (len(self.curves) or 1)))
            for tag, value in line.values.items():
                curve = self.curves.get(tag)
                if curve is None:
                    curve = self.curves[tag] = Curve()
                curve.add(line.step, value, most)
            if time.monotonic() > until and self._at > before:  # each call gets on, however busy the machine
                self.left_bytes = max(0, size - self._at)
                break
        else:  # what is behind the last whole line is not waited for
            self.left_bytes = 0
            if expected is not None:  # the last line is no longer there
                self._begin()
                return self.read(until - time.monotonic())
        return {tag: self.curves[tag] for tag in sorted(self.curves, key=_place)}


def _place(tag: str) -> tuple[int, str]:
    group = "" if tag == "train/loss" else tag.split("/")[0]
    return (_ORDER.index(group) if group in _ORDER else _ORDER.index("other")), tag


#: Figures of the run itself come last. Some are one for each rank.
_ASIDE = ("world", "world_own_step_s", "run", "goodput", "usage")
#: The order of the groups of metrics, behind train/loss.
_ORDER = ("", "eval", "train", "other", *_ASIDE)


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


def is_system_metric(tag: str) -> bool:
    """True for a figure of the run itself, not of what is learnt."""
    return tag.split("/")[0] in _ASIDE


def short(value: float) -> str:
    """Return a number in four digits."""
    return f"{value:.4g}"
