"""Draw each docs/benchmarks/*.json as an SVG beside it: a bar for each row, and its spread as a line.

Rows that have a ratio show it; the others show their value.

    python -m tests.bench.draw
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.bench.record import KEPT
from toolkit.cli.report.html import Html, element

ROW, TEXT, BAR, END = 22, 360, 300, 160
#: Grey on white and on black alike: a page may be dark.
STYLE = (
    "text{font:12px sans-serif;fill:#7a828c}.bar{fill:#3b82f6}.no{fill:#d9480f}.spread{stroke:#7a828c;stroke-width:2}"
)


def figure(row: Mapping[str, Any]) -> tuple[float, float, float, str] | None:
    """Return the row's median, least and most, and its words; None for what did not come back."""
    if "ratio" in row:
        ratio = row["ratio"]
        words = f"{ratio['median']:g} times {ratio['to']}"
        return ratio["median"], ratio["least"], ratio["most"], words
    if "median" in row:
        return row["median"], row["least"], row["most"], f"{row['median']:g} {row['unit']}"
    if not row["back"]:
        return None
    lost = f", {row['lost']} steps again" if row["restarted"] else ", not restarted"
    return row["seconds"], row["seconds"], row["seconds"], f"{row['seconds']:g} s{lost}"


def picture(title: str, rows: Sequence[Mapping[str, Any]]) -> Html:
    """Return the bars of one file, on one axis from 0."""
    figures = [figure(row) for row in rows]
    longest = max((most for found in figures if found for most in found[1:3]), default=1.0) or 1.0
    parts: list[Html] = [element("style", Html(STYLE)), element("text", title, x=0, y=14)]
    for number, (row, found) in enumerate(zip(rows, figures, strict=True), 1):
        y = number * ROW + 4
        parts.append(element("text", row["name"], x=0, y=y + 13))
        if found is None:
            parts.append(element("text", f"does not come back: {row['end']}", x=TEXT, y=y + 13, class_="no"))
            continue
        median, least, most, words = found
        width, begin, end = (round(BAR * value / longest, 1) for value in (median, least, most))
        parts.append(element("rect", x=TEXT, y=y + 3, width=width, height=ROW - 8, class_="bar"))
        middle = y + ROW / 2 - 1
        parts.append(element("line", x1=TEXT + begin, x2=TEXT + end, y1=middle, y2=middle, class_="spread"))
        parts.append(element("text", words, x=TEXT + max(width, end) + 6, y=y + 13))
    size = f"0 0 {TEXT + BAR + END + 160} {(len(rows) + 1) * ROW + 8}"
    return element("svg", *parts, xmlns="http://www.w3.org/2000/svg", viewBox=size, role="img", aria_label=title)


def draw(file: Path) -> None:
    """Write the picture of a file of results beside it."""
    kept = json.loads(file.read_text())
    machine = kept["machine"]
    title = f"{kept['command']}, {kept['date']}, {machine['cpu']}, {machine['cores']} cores"
    file.with_suffix(".svg").write_text(picture(title, kept["rows"]) + "\n")


def main() -> None:
    """Draw all."""
    for file in sorted(KEPT.glob("*.json")):
        draw(file)


if __name__ == "__main__":
    main()
