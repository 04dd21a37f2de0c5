"""Where the parts of a line chart are. Its SVG is in templates/macros.html, colours, dashes and fonts in page.css."""

from __future__ import annotations

import math
from collections.abc import Sequence

from toolkit.plugins.report.curves import Curve

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
