"""A bench's results as a JSON file: command, machine, versions and rows.

Seconds hold on one machine only. Ratios to a peer of the same run and counts hold elsewhere: compare.py compares only
these.
"""

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
from types import MappingProxyType
from typing import Any

from toolkit.base import fsio

ROOT = Path(__file__).parents[2]
#: The results that the pages show.
KEPT = ROOT / "docs" / "benchmarks"
#: Options that do not belong to the command: its result, and those of processes that it starts.
OWN = {"--json", "--rank", "--folder"}
PACKAGES = ("torch", "lightning", "accelerate", "submitit", "pyarrow")


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--json FILE``."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file, too")


def row(
    name: str, values: Sequence[float], unit: str = "s", *, to: Sequence[float] = (), peer: str = "", better: str = ""
) -> dict[str, Any]:
    """Return the row of a measure: the median and the extremes of the rounds' ``values``.

    ``to`` are the values of the ``peer`` in the same rounds; the peer's own row has no ratio. ``better`` is ``less``,
    ``more`` or ``same`` where the ratio, or a value without a peer, holds on other machines: by default of ratios.
    """
    result = {"name": name, "unit": unit, **_spread(values)}
    if to and to is not values:
        result |= {"better": better or "less", "ratio": {"to": peer, **_spread(_ratios(values, to))}}
    elif better and not to:
        result["better"] = better
    return result


def _ratios(values: Sequence[float], to: Sequence[float]) -> list[float]:
    if len(values) == len(to):
        return [ours / theirs for ours, theirs in zip(values, to, strict=True)]
    return [ours / statistics.median(to) for ours in values]


def _spread(values: Sequence[float]) -> dict[str, float]:
    found = {"median": statistics.median(values), "least": min(values), "most": max(values)}
    short = {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in found.items()}
    return short | {"rounds": len(values)}


def write(file: Path | None, rows: Sequence[Mapping[str, Any]], more: Mapping[str, str] = MappingProxyType({})) -> None:
    """Write the rows with what they depend on, with ``more`` versions; nothing without a file."""
    if file is None:
        return
    file_of_bench = Path(sys.argv[0])
    module = f"tests.{file_of_bench.parent.name}.{file_of_bench.stem}".removesuffix(".__main__")
    words = _of_user(sys.argv[1:])
    data = {
        "command": shlex.join(["python", "-m", module, *words]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": _commit(),
        "machine": machine(),
        "versions": {**versions(), **more},
        "rows": list(rows),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    fsio.write_atomic(file, json.dumps(data, indent=1) + "\n")


def rows_of(file: Path | None) -> dict[str, dict[str, Any]]:
    """Return the rows of a file by name; none without a file."""
    if file is None or not file.exists():
        return {}
    return {each["name"]: each for each in json.loads(file.read_text())["rows"]}


def versions_of(file: Path | None, names: Sequence[str]) -> dict[str, str]:
    """Return the versions of packages that a file has; none without a file."""
    if file is None or not file.exists():
        return {}
    return {name: version for name, version in json.loads(file.read_text())["versions"].items() if name in names}


def _of_user(words: Sequence[str]) -> list[str]:
    """Return the words without the options of OWN and without the folders of paths.

    Both belong to this machine.
    """
    kept, is_value = [], False
    for word in words:
        if not is_value and word not in OWN:
            kept.append(word if "/" not in word else Path(word).name)
        is_value = word in OWN
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
    """Return the package's last commit, with a ``+`` if files have changed since."""
    last, changed = (
        subprocess.run(["git", "-C", str(ROOT), *words, "--", "toolkit"], capture_output=True, text=True).stdout.strip()
        for words in (["log", "-1", "--format=%h"], ["status", "--porcelain"])
    )
    return last + "+" * bool(changed)
