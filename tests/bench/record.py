"""What a bench has measured, as a JSON file: the command, the machine, the versions and the rows.

Seconds hold on one machine only, and ratios to a peer of the same run hold elsewhere: only these are compared, see
compare.py.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from toolkit import fsio

ROOT = Path(__file__).parents[2]
#: The results that the pages show.
KEPT = ROOT / "docs" / "benchmarks"
PACKAGES = ("torch", "lightning", "accelerate", "submitit", "pyarrow")


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--json FILE``."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file, too")


def row(
    name: str, values: Sequence[float], unit: str = "s", *, to: Sequence[float] = (), peer: str = "", more: bool = False
) -> dict[str, Any]:
    """Return the row of a measure: the median and the extremes of the rounds' ``values``.

    ``to`` are the values of the ``peer`` in the same rounds. ``more``: a greater value is better.
    """
    result = {"name": name, "unit": unit, **_spread(values)}
    if to:
        result["ratio"] = {"to": peer, "more_is_better": more, **_spread(_ratios(values, to))}
    return result


def _ratios(values: Sequence[float], to: Sequence[float]) -> list[float]:
    if len(values) == len(to):
        return [ours / theirs for ours, theirs in zip(values, to, strict=True)]
    return [ours / statistics.median(to) for ours in values]


def _spread(values: Sequence[float]) -> dict[str, float]:
    found = {"median": statistics.median(values), "least": min(values), "most": max(values)}
    return {name: float(f"{value:.4g}") for name, value in found.items()} | {"rounds": len(values)}


def write(file: Path | None, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the rows with what they depend on; nothing without a file."""
    if file is None:
        return
    module = Path(sys.argv[0])
    words = _without_file(sys.argv[1:])
    data = {
        "command": shlex.join(["python", "-m", f"tests.{module.parent.name}.{module.stem}", *words]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": _commit(),
        "machine": machine(),
        "versions": versions(),
        "rows": list(rows),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    fsio.write_atomic(file, json.dumps(data, indent=1) + "\n")


def rows_of(file: Path | None) -> dict[str, dict[str, Any]]:
    """Return the rows of a file by name; none without a file."""
    if file is None or not file.exists():
        return {}
    return {each["name"]: each for each in json.loads(file.read_text())["rows"]}


def _without_file(words: Sequence[str]) -> list[str]:
    """Leave out ``--json FILE``, and the folders of a path: they are this machine's."""
    kept, is_file = [], False
    for word in words:
        if not is_file and word != "--json":
            kept.append(word if "/" not in word else Path(word).name)
        is_file = word == "--json"
    return kept


def machine() -> dict[str, Any]:
    """Return what the seconds depend on."""
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    name = found[1] if found else platform.processor()
    return {"cpu": name, "cores": os.cpu_count(), "memory_gib": round(memory, 1), "load": round(os.getloadavg()[1], 1)}


def versions() -> dict[str, str]:
    """Return the versions of Python and of what is measured beside us."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> str:
    """Return the last commit of the package, with a ``+`` where files of it have been changed since."""
    last, changed = (
        subprocess.run(["git", "-C", str(ROOT), *words, "--", "toolkit"], capture_output=True, text=True).stdout.strip()
        for words in (["log", "-1", "--format=%h"], ["status", "--porcelain"])
    )
    return last + "+" * bool(changed)
