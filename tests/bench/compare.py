"""Repeat the benches of docs/benchmarks/*.json, and print the changes beyond the spread.

A change counts from 5 % beyond the spread, which is the extremes of the kept rounds. Compared are counts, and ratios to
a peer of the same run. Seconds are not compared: they were measured on another machine. Ends with 1 if anything has
become worse.

    python -m tests.bench.compare [NAME ...] [--fresh FOLDER]

``NAME`` is the name of a kept file. ``--fresh`` takes results from a folder, and writes the missing ones into it.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.bench.record import KEPT

#: A change below this is noise.
TOLERANCE = 0.05


def changes(kept: Mapping[str, Any], fresh: Mapping[str, Any]) -> Iterator[tuple[bool, str]]:
    """Yield (is worse, words) for each figure that has changed or is missing.

    A figure has changed if it is more than TOLERANCE beyond the kept spread.
    """
    now = {row["name"]: row for row in fresh["rows"]}
    for row in kept["rows"]:
        if "better" not in row:
            continue
        old, new = (each.get("ratio", each) for each in (row, now.get(row["name"], {})))
        if "median" not in new:
            yield True, f"{row['name']}: not measured any more"
            continue
        median = new["median"]
        beyond = median - min(max(median, old["least"]), old["most"])
        # Relative to the nearer end of the spread; where that end is 0, any change is one of 100 %.
        share = abs(beyond) / (abs(median - beyond) or abs(beyond) or 1.0)
        if share <= TOLERANCE:
            continue
        is_worse = row["better"] == "same" or (beyond < 0) == (row["better"] == "more")
        spread = f"{old['median']:g} ({old['least']:g} to {old['most']:g})"
        unit = f"times {old['to']}" if "to" in old else old["unit"]
        word = "worse" if is_worse else "better"
        yield is_worse, f"{row['name']}: {median:g} {unit}, was {spread}: {share:.0%} {word} than that"


def measured(kept: Mapping[str, Any], file: Path) -> Mapping[str, Any]:
    """Return the results in ``file``; run the command of ``kept`` first where there is none."""
    if not file.exists():
        module = shlex.split(kept["command"])[2:]
        print(f"{kept['command']} ...", flush=True)
        subprocess.run(
            [sys.executable, "-m", *module, "--json", str(file)], check=True, stdout=subprocess.DEVNULL, timeout=7200
        )
    return json.loads(file.read_text())


def main() -> int:
    """Compare, and print the changes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: every kept file that has such figures")
    parser.add_argument("--fresh", type=Path, help="a folder with results, which gets those that are missing")
    parser.add_argument("--kept", type=Path, default=KEPT, help="the folder of the results to compare with")
    args = parser.parse_args()
    found = {file.stem: json.loads(file.read_text()) for file in sorted(args.kept.glob("*.json"))}
    names = args.names or [name for name, kept in found.items() if any("better" in row for row in kept["rows"])]
    is_worse = False
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            if name not in found:
                parser.error(f"there is no {args.kept / name}.json; there are: {', '.join(found)}")
            # Each name is measured only when its turn comes: a bench takes minutes.
            seen = list(changes(found[name], measured(found[name], (args.fresh or Path(folder)) / f"{name}.json")))
            print(f"{name}: {'as on ' + found[name]['date'] if not seen else ''}".rstrip(": "))
            for worse, text in seen:
                is_worse |= worse
                print(f"  {text}", flush=True)
    return int(is_worse)


if __name__ == "__main__":
    sys.exit(main())
