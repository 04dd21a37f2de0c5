"""`toolkit compare RUN RUN`: what differs between two runs in config, versions, sources and curves."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.base import fsio
from toolkit.cli.tables import Table
from toolkit.files.rundir import RunDir
from toolkit.metrics import lines
from toolkit.plugins.report.facts import ReportFacts, facts_of

#: Notes about the copy of the sources, such as the folder it came from: not a part of the sources.
_NOTES = {"SNAPSHOT.json", "SNAPSHOT.diff"}
#: The most bytes of a file whose lines are compared, and the most lines of differences in the table's form.
_MOST_BYTES, _MOST_LINES = 1 << 20, 200
#: Curves of the training itself; those of the machine differ from run to run.
_CURVES = ("train/", "eval/")


def facts(first: RunDir, second: RunDir) -> dict[str, Any]:
    """Return everything that differs, and the curves of both."""
    runs = [facts_of(first), facts_of(second)]
    parts: dict[str, dict[str, Any]] = {"config": {}, "version of": {}, "result": {}, "": {}}
    for name, values in differing(runs):
        # The empty kind is the last one: every name begins with it.
        kind = next(kind for kind in parts if name.startswith(kind))
        parts[kind][name.removeprefix(kind).strip()] = values
    return {
        "runs": [run.title for run in runs],
        "outcome": parts[""],
        "config": parts["config"],
        "environment": parts["version of"],
        "results": parts["result"],
        "sources": _sources(first.code, second.code),
        "curves": _curves(first, second),
    }


def _sources(first: Path, second: Path) -> dict[str, Any]:
    """Return which files are in one run's sources only, which differ, and how."""
    mine, other = _files(first), _files(second)
    both = sorted(mine.keys() & other.keys())
    changed = [name for name in both if fsio.read_bytes(mine[name]) != fsio.read_bytes(other[name])]
    diff = ""
    for name in changed:
        one, two = mine[name], other[name]
        # difflib's time can grow with the square of the number of lines.
        if max(one.stat().st_size, two.stat().st_size) > _MOST_BYTES:
            diff += f"{name} differs and is large\n"
            continue
        before, after = (fsio.read_text(path, errors="replace").splitlines(keepends=True) for path in (one, two))
        for line in difflib.unified_diff(before, after, f"first/{name}", f"second/{name}"):
            # The last line of a file may lack its line end.
            diff += line if line.endswith("\n") else f"{line}\n"
    return {
        "only_first": sorted(mine.keys() - other.keys()),
        "only_second": sorted(other.keys() - mine.keys()),
        "changed": changed,
        "diff": diff,
    }


def _files(code: Path) -> dict[str, Path]:
    """Return the files of a copy of sources by their relative paths. Without a copy there are none."""
    found = {str(path.relative_to(code)): path for path in code.rglob("*") if path.is_file()} if code.is_dir() else {}
    return {name: path for name, path in found.items() if name not in _NOTES and "__pycache__" not in path.parts}


def _curves(first: RunDir, second: RunDir) -> dict[str, dict[str, Any]]:
    """Return both runs' last values of each metric, and those at the last step that both have."""
    mine, other = _points(first), _points(second)
    found: dict[str, dict[str, Any]] = {}
    for tag in sorted(mine.keys() | other.keys()):
        common = max(mine[tag].keys() & other[tag].keys(), default=None)
        found[tag] = {
            "last": [points[max(points)] if points else None for points in (mine[tag], other[tag])],
            "common_step": common,
            "at_common_step": None if common is None else [mine[tag][common], other[tag][common]],
        }
    return found


def _points(run: RunDir) -> defaultdict[str, dict[int, float]]:
    points: defaultdict[str, dict[int, float]] = defaultdict(dict)
    for line in lines.read(lines.path_of(run)):
        for tag, value in line.values.items():
            if tag.startswith(_CURVES):
                points[tag][line.step] = value
    return points


def format_text(found: Mapping[str, Any], width: int | None = None) -> str:
    """Return the differences for a terminal."""
    rows: list[tuple[str, ...]]
    parts = [f"first:  {found['runs'][0]}\nsecond: {found['runs'][1]}"]
    for title in ("outcome", "config", "environment", "results"):
        rows = [(f"  {name}", *map(_text, values)) for name, values in found[title].items()]
        same = f"{title}: no difference"
        parts.append(f"{title}:\n{Table([('  ', 'FIRST', 'SECOND'), *rows], width, is_named=True)}" if rows else same)
    # A difference is taken at a common step only: the last values may be of different steps.
    rows = [("  ", "FIRST", "SECOND", "AT STEP", "FIRST", "SECOND", "DIFFERENCE")]
    for tag, curve in found["curves"].items():
        at = curve["at_common_step"]
        values = ("-", "-", "-") if at is None else (*map(_text, at), _text(at[1] - at[0]))
        rows.append((f"  {tag}", *map(_text, curve["last"]), _text(curve["common_step"]), *values))
    title = "curves, the last values and those at the last step that both have"
    parts.append(f"{title}:\n{Table(rows, width, is_named=True)}" if found["curves"] else "curves: none")
    sources = found["sources"]
    names = [f"  only in the {which}: {name}" for which in ("first", "second") for name in sources[f"only_{which}"]]
    diff = sources["diff"].splitlines()
    if len(diff) > _MOST_LINES:
        diff = [*diff[:_MOST_LINES], f"... {len(diff) - _MOST_LINES} more lines: --json has them all"]
    parts.append("\n".join(["sources:", *names, *diff]) if names or diff else "sources: no difference")
    return "\n\n".join(parts)


def _text(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else "-" if value is None else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def differing(runs: Sequence[ReportFacts]) -> list[tuple[str, list[Any]]]:
    """Return the facts that differ between the runs, with the value of each run. A run without the fact has None.

    Values that are not shown are compared all the same.
    """
    columns = [_comparable(facts) for facts in runs]
    real = [
        {**column, **{f"config {key}": value for key, value in facts.hidden.items()}}
        for column, facts in zip(columns, runs, strict=True)
    ]
    names = dict.fromkeys(name for column in columns for name in column)
    return [
        (name, [column.get(name) for column in columns])
        for name in names
        if any(column.get(name) != real[0].get(name) for column in real)
    ]


def _comparable(facts: ReportFacts) -> dict[str, Any]:
    last = facts.attempts[-1] if facts.attempts else None
    return {
        "state": str(facts.told["state"]),
        "step": facts.figures["step"],
        "attempts": len(facts.attempts),
        "ranks": last and last.world_size,
        "nodes": last and len(last.nodes),
        **{f"result {name}": value for name, value in sorted(facts.figures["metrics"].items())},
        **{f"version of {name}": version for name, version in facts.versions.items()},
        **{f"config {key}": value for key, value in facts.config.items()},
    }


def as_data(
    runs: Sequence[ReportFacts], compared: ReportFacts | None, unreadable: Sequence[str] = ()
) -> dict[str, Any]:
    """Return what the report says for a JSON document. ``unreadable`` are the runs left out, and why."""
    drawn = [*runs, compared] if compared is not None else [*runs]
    different = {
        name: dict(zip([facts.title for facts in drawn], values, strict=True)) for name, values in differing(drawn)
    }
    return {"runs": [facts.to_json() for facts in runs], "differences": different, "unreadable": unreadable}
