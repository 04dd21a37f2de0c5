"""What the name of a run means among sweeps."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from toolkit.base import reading
from toolkit.base.errors import RunNotFoundError
from toolkit.files.rundir import SWEEPS, RunDir


def named_runs(text: str, by_name: Sequence[RunDir], root: Path) -> Sequence[RunDir]:
    """Return those of ``by_name``, the runs of the name ``text``, that it means.

    A sweep with a name of its own leaves the config's name to the newest run that is no point. Raises RunNotFoundError
    if ``text`` means all points of a sweep, or one that has not started.
    """
    newest = by_name[-1].point() if by_name else None
    if newest is not None and newest.sweep != text:
        alone = next((run for run in reversed(by_name) if run.point() is None), None)
        by_name = by_name if alone is None else [alone]
    if (sweep := _sweep_of(text, by_name, root)) is not None:
        raise RunNotFoundError(
            f"{text!r} names the points of sweep {sweep}: `toolkit sweep status {sweep}` lists their runs, and "
            f"`toolkit sweep stop {sweep}` ends them; one of them is named by its last eight digits",
            sweep,
        )
    if not by_name and (point := _point_to_start(text, root)) is not None:
        sweep, run_id = point
        raise RunNotFoundError(
            f"run {run_id} is a point of sweep {sweep} that has not started; `toolkit sweep status {sweep}` says what "
            "it waits for"
        )
    return by_name


def _sweep_of(name: str, runs: Sequence[RunDir], root: Path) -> str | None:
    """Return the sweep that a config's name means, None if it means a single run. ``runs`` have that name."""
    newest = runs[-1] if runs else None
    if newest is not None and (point := newest.point()) is not None:
        return point.sweep
    # A sweep has the config's name if it was given no other. It may be that none of its points has started.
    try:
        stamp = str(json.loads(reading.read_bytes(root / SWEEPS / name / "sweep.json"))["stamp"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return name if newest is None or stamp > newest.id else None


def _point_to_start(text: str, root: Path) -> tuple[str, str] | None:
    """Return the sweep and the run id of a point without a folder, by its id, its beginning or last eight digits."""
    for path in sorted((root / SWEEPS).glob("*/arrays/*.jsonl")):
        for found in re.finditer(r'"run": ?"([^"]+)/([^"/]+)"', reading.read_text(path, errors="replace")):
            if found[2].startswith(text) or text in (found[2][-8:], f"{found[1]}/{found[2]}"):
                return path.parents[1].name, found[2]
    return None
