"""Draw results of docs/benchmarks/ as SVG files beside them.

Rows become bars, and results of ``tests.scale`` curves.

python -m tests.bench.draw
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from tests.bench.page import number, outcome
from tests.bench.record import KEPT

Row = Mapping[str, Any]
DRAWN = ("failures", "loop", "restart", "scale", "startup")
ROW, TEXT, BAR, END = 22, 360, 300, 320
#: Of a curve's picture: its size, and the room for words around its axes.
WIDTH, HEIGHT, SIDE, TOP, BESIDE = 310, 200, 50, 40, 3
#: Grey on white and on black alike: a page may be dark.
STYLE = (
    "text{font:12px sans-serif;fill:#7a828c}.bar{fill:#3b82f6}.no{fill:#d9480f}.spread{stroke:#7a828c;stroke-width:2}"
    ".axis{stroke:#7a828c;fill:none}.cpu{stroke:#3b82f6;stroke-width:2;fill:none}.wall{stroke:#d9480f;fill:none}"
)


def element(tag: str, *children: object, **attributes: object) -> Markup:
    """Return an element. Of an attribute's name a last ``_`` is dropped, and others become ``-``."""
    words = "".join(f' {name.rstrip("_").replace("_", "-")}="{escape(value)}"' for name, value in attributes.items())
    return Markup(f"<{tag}{words}>{''.join(map(escape, children))}</{tag}>")


def bar(row: Row) -> tuple[float, float, float, str] | None:
    """Return the row's median, least and most, and its words.

    None if no round of a fault came back.
    """
    if "outcomes" in row:
        seconds = sorted(each["seconds"] for each in row["outcomes"] if each["back"])
        if not seconds:
            return None
        return seconds[len(seconds) // 2], seconds[0], seconds[-1], outcome(row["outcomes"])
    words = f"{number(row['median'])} {row['unit']}"
    if "ratio" in row:
        words += f", {number(row['ratio']['median'])} times {row['ratio']['to']}"
    return row["median"], row["least"], row["most"], words


def bars(title: str, rows: Sequence[Row]) -> Markup:
    """Return a bar for each row, with its spread as a line.

    Bars of one unit share an axis that begins at 0.
    """
    found = [(row, bar(row)) for row in rows]
    # The longest bar of a unit, its spread included, is BAR wide.
    longest: dict[str, float] = {}
    for row, drawn in found:
        longest[row["unit"]] = max(longest.get(row["unit"], 0.0), drawn[2] if drawn else 0.0)
    parts = [element("text", title, x=0, y=14)]
    for place, (row, drawn) in enumerate(found, 1):
        y = place * ROW + 4
        parts.append(element("text", row["name"], x=0, y=y + 13))
        if drawn is None:
            parts.append(element("text", outcome(row["outcomes"]), x=TEXT, y=y + 13, class_="no"))
            continue
        scale = BAR / (longest[row["unit"]] or 1.0)
        width, begin, end = (round(scale * max(value, 0.0), 1) for value in drawn[:3])
        parts.append(element("rect", x=TEXT, y=y + 3, width=width, height=ROW - 8, class_="bar"))
        middle = y + ROW / 2 - 1
        parts.append(element("line", x1=TEXT + begin, x2=TEXT + end, y1=middle, y2=middle, class_="spread"))
        parts.append(element("text", drawn[3], x=TEXT + max(width, end) + 6, y=y + 13))
    return picture(title, TEXT + BAR + END, (len(rows) + 1) * ROW + 8, parts)


def curves(title: str, rows: Sequence[Row]) -> Markup:
    """Return a small picture for each curve: CPU and wall seconds over the size.

    Both axes are logarithmic.
    """
    parts = [element("text", f"{title}: seconds of CPU (blue) and of the clock (red) by size", x=0, y=14)]
    names = [*dict.fromkeys(row["curve"] for row in rows)]
    for place, name in enumerate(names):
        x, y = place % BESIDE * WIDTH, place // BESIDE * HEIGHT + 30
        of_curve = [row for row in rows if row["curve"] == name]
        parts.append(element("g", *one_curve(name, of_curve), transform=f"translate({x},{y})"))
    return picture(title, BESIDE * WIDTH, math.ceil(len(names) / BESIDE) * HEIGHT + 30, parts)


def one_curve(name: str, rows: Sequence[Row]) -> Iterator[Markup]:
    """Yield the parts of one curve's picture."""
    lines = {
        kind: [(row["size"], max(row["median"], 0.01)) for row in rows if row["column"] == column]
        for kind, column in (("wall", "wall s"), ("cpu", "CPU s"))
    }
    sizes = [size for size, _ in lines["cpu"]]
    seconds = [value for points in lines.values() for _, value in points]
    # The axis of seconds spans whole decades, and at least one.
    low, high = 10 ** math.floor(math.log10(min(seconds))), 10 ** math.ceil(math.log10(max(seconds)))
    high = max(high, 10 * low)
    width, height = WIDTH - SIDE - 30, HEIGHT - TOP - 40

    def across(size: float) -> float:
        return round(SIDE + width * _share(size, min(sizes), max(sizes)), 1)

    def down(value: float) -> float:
        return round(TOP + height * (1 - _share(value, low, high)), 1)

    yield element("text", f"{name}, by {rows[0]['sizes']}", x=SIDE, y=TOP - 12)
    yield element("path", d=f"M{SIDE},{TOP}V{TOP + height}H{SIDE + width}", class_="axis")
    for value in (low, high):
        yield element("text", f"{value:g} s", x=SIDE - 6, y=down(value) + 4, text_anchor="end")
    for size in {min(sizes), max(sizes)}:
        yield element("text", f"{size:,}", x=across(size), y=TOP + height + 16, text_anchor="middle")
    for kind, points in lines.items():
        places = [(across(size), down(value)) for size, value in points]
        for (x1, y1), (x2, y2) in pairwise(places):
            yield element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=kind)
        for x, y in places:
            yield element("circle", cx=x, cy=y, r=2.5, class_=kind)


def _share(value: float, low: float, high: float) -> float:
    return math.log(value / low) / math.log(high / low) if high > low else 0.5


def picture(title: str, width: int, height: int, parts: Sequence[Markup]) -> Markup:
    """Return the parts as one SVG."""
    style = element("style", Markup(STYLE))
    size = f"0 0 {width} {height}"
    return element("svg", style, *parts, xmlns="http://www.w3.org/2000/svg", viewBox=size, role="img", aria_label=title)


def kept() -> list[Path]:
    """Return the files of DRAWN that there are."""
    return [file for name in DRAWN if (file := KEPT / f"{name}.json").exists()]


def drawn(file: Path) -> str:
    """Return the picture of a file of results."""
    told = json.loads(file.read_text())
    machine = told["machine"]
    title = f"{told['command']}, {told['date']}, {machine['cpu']}, {machine['cores']} cores"
    return (curves if "curve" in told["rows"][0] else bars)(title, told["rows"]) + "\n"


def main() -> None:
    """Draw all."""
    for file in kept():
        file.with_suffix(".svg").write_text(drawn(file))


if __name__ == "__main__":
    main()
