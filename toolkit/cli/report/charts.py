"""Line charts as SVG. Colours, dashes and fonts are in page.css, so that they follow the reader's colour scheme."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from toolkit.cli.report.curves import Curve
from toolkit.cli.report.html import Html, element, text

WIDTH, HEIGHT = 420, 190
LEFT, RIGHT, TOP, BOTTOM = 58, 10, 8, 24
#: What the axis of a chart of usage reaches at least, in CPUs, GiB or GPUs.
LEAST_USAGE = 0.1
#: The number of colours for runs. Further runs begin again with the first.
COLOURS = 8


def chart(tag: str, curves: Sequence[tuple[str, Curve | None]], last_step: int, restarts: Iterable[int]) -> Html:
    """Return the chart of one metric, with a line for each run that has it.

    The lines are in the order of the runs. ``restarts`` are the steps that an attempt of the run began with.
    """
    pieces = [piece for _, curve in curves if curve is not None for piece in curve.pieces.values()]
    low = min((piece.least[1] for piece in pieces), default=0.0)
    high = max((piece.greatest[1] for piece in pieces), default=1.0)
    if tag.startswith("usage/"):  # amounts: a few kilobytes would fill a chart of their own, marked 1e-06 GiB
        low, high = 0.0, max(high, LEAST_USAGE)
    scale = Scale(last_step, low, high)
    parts: list[Html] = [*scale.grid()]
    parts += [scale.rule(step) for step in restarts if 0 < step <= last_step]
    for number, (_, curve) in enumerate(curves):
        if curve is not None:
            parts += _line(curve, scale, number)
    names = ", ".join(name for name, curve in curves if curve is not None)
    title = element("title", f"{tag} by step, of {names}: from {short(low)} to {short(high)}")
    return element("svg", title, *parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", class_="chart")


def _line(curve: Curve, scale: Scale, number: int) -> list[Html]:
    path, dots = "", []
    for stroke in curve.strokes():
        places = [scale.place(step, value) for step, value in stroke]
        path += _path(places)
        # A path of one point draws nothing.
        if len(places) == 1:
            dots.append(
                element("circle", cx=places[0][0] / 10, cy=places[0][1] / 10, r=2, class_=f"dot s{number % COLOURS}")
            )
    line = element("path", d=path, class_=f"line s{number % COLOURS}")
    if curve.first_bad is not None:
        x = scale.place(curve.first_bad, scale.low)[0] / 10
        mark = element(
            "text", "NaN", element("title", "the first value that is not finite"), x=x, y=TOP + 10, class_="bad"
        )
        dots.append(mark)
    return [line, *dots]


def _path(places: Sequence[tuple[int, int]]) -> str:
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
        self.low, self.high = low - margin, high + margin
        self._last_step = max(last_step, 1)

    def place(self, step: int, value: float) -> tuple[int, int]:
        """Return x and y in tenths of the chart's units."""
        x = LEFT + (WIDTH - LEFT - RIGHT) * step / self._last_step
        # Each divided by itself first: the difference of two huge numbers may be infinite.
        share = (value / 2 - self.low / 2) / (self.high / 2 - self.low / 2)
        y = HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share
        return round(10 * x), round(10 * y)

    def rule(self, step: int) -> Html:
        """Return an upright line where an attempt began."""
        x = self.place(step, self.low)[0] / 10
        return element("line", x1=x, x2=x, y1=TOP, y2=HEIGHT - BOTTOM, class_="restart")

    def grid(self) -> Iterable[Html]:
        """Yield the frame, and a line with a number at each round value."""
        for value in ticks(self.low, self.high, 5):
            y = self.place(0, value)[1] / 10
            yield element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, class_="grid")
            yield element("text", short(value), x=LEFT - 6, y=y + 4, class_="y")
        for value in ticks(0, self._last_step, 5):
            x = self.place(round(value), self.low)[0] / 10
            yield element("text", _steps(round(value)), x=x, y=HEIGHT - 6, class_="x")


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


def _steps(step: int) -> str:
    for size, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if step >= 10 * size or (step >= size and step % size == 0):
            return f"{step / size:g}{unit}"
    return str(step)


def bar(parts: Iterable[tuple[str, float, float]], label: str) -> Html:
    """Return a bar over the whole width. Each part has a CSS class, and its begin and end as shares of the width."""
    rects = (
        element("rect", x=f"{100 * start:.3f}%", width=f"{100 * (end - start):.3f}%", height="100%", class_=name)
        for name, start, end in parts
        if end > start
    )
    return element("svg", element("title", label), *rects, class_="bar", role="img", aria_label=text(label))
