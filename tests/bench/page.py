"""The generated parts of the pages, which `make docs` fills in: tables of results, causes, the map of the files.

    python -m tests.bench.page PAGE

prints a page of docs/ with them. A mark stands in a line of its own. ``<!-- results: NAME -->`` becomes the command of
docs/benchmarks/NAME.json, what its values depend on, its rows (of scale.json those with a goal) and its picture;
``<!-- curve: NAME -->`` one curve of scale.json; ``<!-- causes -->`` the rules of `toolkit why`; ``<!-- map -->`` the
packages. A row whose name has a colon is a cell: the line, and the column. Goals stand here.
"""

import ast
import json
import operator
import re
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.bench import record
from tests.bench import why as causes
from tests.bench.record import KEPT, ROOT

Row = Mapping[str, Any]
#: Of rows by file and name: which figures are wanted, in the unit of the row, or of the ratio.
GOALS: Mapping[str, Mapping[str, str]] = {
    "goodput": {"goodput": "median >= 95"},
    "checkpoint": {"ours: blocked": "ratio <= 1.2"},
    "images": {"crop, 2 workers, ours": "ratio >= 1.6", "recipe, 2 workers, ours": "ratio >= 1.4"},
    "kills": {"job with ddp, a rank lost, to a step of all": "median <= 1, most <= 3", "repeated steps": "most <= 1"},
    "kills-fsdp": {
        "job with fsdp, a rank lost, to a step of all": "median <= 1, most <= 3",
        "repeated steps": "most <= 1",
    },
    "kills-node": {"job with ddp, a node lost, to a step of all": "median <= 3"},
    "listing": {
        "10,000 runs: wall": "median <= 2",
        "calls in an hour of 10 terminals that watch 100 runs": "median <= 120",
    },
    "loop": {"steps by ours, of bare DDP": "ratio >= 0.95", "agreement and reports, of a step": "median <= 0.5"},
    "memory": {"blocked on 1 nodes": "ratio <= 1.3", "blocked on 2 nodes": "ratio <= 1.3"},
    "monitor": {"monitor of 73 processes, of a core": "median <= 0.1"},
    "one_rank": {
        "beyond the hand-written loop, job": "median <= 100",
        "beyond the hand-written loop, toolkit.start": "median <= 100",
    },
    "scale": {
        "connections of agents, 10,000 nodes: oldest progress s": "median <= 2",
        "connections of agents, 10,000 nodes: CPU s a second": "median <= 1",
        "connections of agents, 10,000 nodes: MB": "median <= 500",
        "lost node, 10,000 nodes: wall s": "median <= 1",
        "slow ranks, 64 ranks: 10 % slow, named of 100": "median >= 99",
        "slow ranks, 64 ranks: false alarms in 100 node-days": "median <= 1",
        "stop together, 80,000 ranks: decide s": "median <= 2",
    },
    "shards": {
        "index, cache empty, 100,000,000 rows in 100 files": "median <= 60",
        "bin, ours: warm, of a plain read": "median >= 50",
        "parquet, ours: cold": "ratio >= 0.9",
        "parquet, ours: warm": "ratio >= 0.9",
        "tar, ours: cold": "ratio >= 1",
        "tar, ours: warm": "ratio >= 1",
    },
    "startup": {"CPU of 8 ranks, ours": "ratio <= 1.3", "start to a step on 2 nodes, ours": "ratio <= 1"},
    "sweep": {
        "submit 2000 points": "median <= 60",
        "calls of sbatch": "median <= 2",
        "questions to Slurm by the status": "median <= 1",
    },
    "why": {"held_out: right where it names a cause": "median >= 95"},
}
COMPARE = {"<=": operator.le, ">=": operator.ge}
MARK = re.compile(r"(?m)^<!-- (results|curve|causes|map)(?:: ([^>]*))? -->$")


def number(value: float) -> str:
    """Return a number with three digits, or with all of a large or whole one."""
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def figure(found: Row) -> str:
    """Return the median, and in brackets the extremes of several rounds."""
    if found["least"] == found["most"]:
        return number(found["median"])
    return f"{number(found['median'])} ({number(found['least'])} to {number(found['most'])})"


def goal(row: Row) -> str:
    """Return a row's goal, and whether the row missed it; nothing without a goal."""
    words, missed = [], False
    for part in filter(None, row.get("goal", "").split(", ")):
        which, sign, limit = part.split()
        found = row["ratio"]["median"] if which == "ratio" else row[which]
        missed |= not COMPARE[sign](found, float(limit))
        name = {"median": "", "most": "longest ", "ratio": "times "}[which]
        words.append(f"{name}{'≤' if sign == '<=' else '≥'} {limit}")
    return "; ".join(words) + ": **missed**" * missed


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table of Markdown without the columns in which no line has anything."""
    kept = [index for index in range(len(head)) if any(line[index] for line in lines)]
    rows = [[line[index] for index in kept] for line in (head, ["---"] * len(head), *lines)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def times(row: Row) -> str:
    """Return the ratio of a row, if it has one."""
    return f"{figure(row['ratio'])} times {row['ratio']['to']}" if "ratio" in row else ""


def listed(rows: Sequence[Row]) -> str:
    """Return a line for each row."""
    lines = [[row["name"], f"{figure(row)} {row['unit']}".strip(), times(row), goal(row)] for row in rows]
    return table(["measure", "median (least to most)", "beside", "goal"], lines)


def crossed(rows: Sequence[Row], first: str = "") -> str:
    """Return a table of rows that are called ``LINE: COLUMN``."""
    cells = {tuple(row["name"].rsplit(": ", 1)): row for row in rows}
    columns = dict.fromkeys(column for _, column in cells)
    heads = []
    for column in columns:
        of_column = [row for (_, name), row in cells.items() if name == column]
        peers = dict.fromkeys(row["ratio"]["to"] for row in of_column if "ratio" in row)
        units = [f", {unit}" for unit in dict.fromkeys(row["unit"] for row in of_column) if unit]
        heads.append("".join([column, *units, *(f" (x: times {peer})" for peer in peers)]))
    lines = []
    for name in dict.fromkeys(line for line, _ in cells):
        of_line = [cells.get((name, column)) for column in columns]
        lines.append([name, *(cell(row) for row in of_line)])
    return table([first, *heads], lines)


def cell(row: Row | None) -> str:
    """Return the value of a row, its ratio and its goal."""
    if row is None:
        return ""
    value = f"{number(row['median'])}; {figure(row['ratio'])} x" if "ratio" in row else figure(row)
    parts = [value, goal(row)]
    return "; ".join(filter(None, parts))


def results(file: Path, goals: Mapping[str, str]) -> str:
    """Return the command of a file, what its values depend on, and its rows."""
    if not file.exists():
        return "Not measured yet."
    kept = json.loads(file.read_text())
    machine, torch = kept["machine"], kept["versions"]["torch"]
    where = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']:g} GiB, load {machine['load']:g}"
    head = f"```console\n$ {kept['command']}\n```\n\n{kept['date']}, commit {kept['commit']}, {where}, torch {torch}.\n"
    picture = [f"\n![{file.stem}, drawn](benchmarks/{file.stem}.svg)"] if file.with_suffix(".svg").exists() else []
    rows = [{**row, "goal": goals.get(row["name"], "")} for row in kept["rows"]]
    return "\n".join([head, *_tables(rows, only_goals=file.stem == "scale"), *picture])


def _tables(rows: Sequence[Row], only_goals: bool) -> Iterator[str]:
    if "outcomes" in rows[0]:
        yield failures(rows)
        return
    cells = [row for row in rows if ": " in row["name"]]
    lines = [row for row in rows if ": " not in row["name"]]
    if only_goals:
        yield listed([row for row in rows if row["goal"]])
        return
    if cells:
        yield crossed(cells)
    if cells and lines:
        yield ""
    if lines:
        yield listed(lines)


def failures(rows: Sequence[Row]) -> str:
    """Return a table with a line for each fault and a column for each way.

    The rows are called ``FAULT, WAY``.
    """
    cells = {tuple(row["name"].split(", ")): row["outcomes"] for row in rows}
    ways = dict.fromkeys(way for _, way in cells)
    lines = [
        [fault, *(outcome(cells.get((fault, way), [])) for way in ways)] for fault in dict.fromkeys(f for f, _ in cells)
    ]
    return table(["fault", *ways], lines)


def outcome(rounds: Sequence[Row]) -> str:
    """Return the median and the extremes of the rounds that came back after a fault.

    If none came back, return how the first one ended.
    """
    back = [each for each in rounds if each["back"]]
    if not back:
        return f"no: {rounds[0]['end']}" if rounds else "not measured"
    seconds, lost = (sorted(each[key] for each in back) for key in ("seconds", "lost"))
    spread = f" ({seconds[0]:.1f} to {seconds[-1]:.1f})" if len(back) > 1 else ""
    took = f"{statistics.median(seconds):.1f} s{spread}"
    words = f"{took}, {statistics.median(lost):g} lost" if back[0]["restarted"] else f"continues ({took})"
    return words if len(back) == len(rounds) else f"{len(back)} of {len(rounds)}: {words}"


def curve(file: Path, name: str) -> str:
    """Return the table of one curve."""
    rows = [row for row in record.rows_of(file).values() if row["curve"] == name]
    if not rows:
        return "Not measured yet."
    short = [{**row, "name": f"{row['size']:,}: {row['column']}"} for row in rows]
    return crossed(short, rows[0]["sizes"])


def packages() -> str:
    """Return the map of the files: each package with the first paragraph of its docstring."""
    lines = []
    for file in sorted((ROOT / "toolkit").rglob("__init__.py")):
        text = ast.get_docstring(ast.parse(file.read_text())) or ""
        if text:
            first = text.partition("\n\n")[0].replace("\n", " ").replace("``", "`")
            lines.append([f"`{file.parent.relative_to(ROOT)}/`", re.sub(r":\w+:(?=`)", "", first)])
    return table(["package", "contents"], lines)


def filled(text: str, kept: Path = KEPT, goals: Mapping[str, Mapping[str, str]] = GOALS) -> str:
    """Return a page with its generated parts."""

    def made(match: re.Match[str]) -> str:
        kind, name = match.groups()
        if kind == "causes":
            return causes.table()
        if kind == "map":
            return packages()
        if kind == "curve":
            return curve(kept / "scale.json", name)
        return results(kept / f"{name}.json", goals.get(name, {}))

    return MARK.sub(made, text)


if __name__ == "__main__":
    print(filled((ROOT / "docs" / sys.argv[1]).read_text()))
