"""The values that users have set while a run trained, as the run's history: ``changes.jsonl``.

``config.yaml`` keeps the values that the run was started with. A value holds from a step on, as a function of the step:
a restart from an earlier checkpoint trains up to that step with the earlier value, as the run did before.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.base import fsio, reading
from toolkit.base.errors import listing
from toolkit.files import records
from toolkit.files.json_record import NULL, FileRecord
from toolkit.files.run_files import Moment
from toolkit.files.rundir import RunDir
from toolkit.run.records.stop_request import Plain

#: These take effect between two steps, and nothing has to be built anew.
LIVE = (
    *("optim.lr", "optim.min_lr"),
    *("train.log_every", "train.eval_every"),
    *("checkpoint.every_steps", "checkpoint.every_min", "checkpoint.keep", "checkpoint.keep_every"),
)


@dataclass(frozen=True)
class Change(FileRecord):
    """A line of ``changes.jsonl``: what was set by one request."""

    time: Moment
    values: Mapping[str, Plain]
    step: int | None = field(default=None, metadata=NULL)  #: the first with these values; None: by a resume
    request: str | None = field(default=None, metadata=NULL)


def read(run: RunDir, damage: list[str] | None = None) -> list[Change]:
    """Return the lines that can be read, oldest first. ``damage`` gets the others; without it they go into the log."""
    found = []
    for line in Change.read_lines(_path(run), damage):
        others = sorted(line.values.keys() - {*LIVE})
        if others:
            records.note(f"{_path(run)}: a line sets {listing(others)}, which no run can take; left out", damage)
        else:
            found.append(line)
    return found


def append(run: RunDir, change: Change) -> None:
    """Append a line, durably. Raises OSError, and then nothing is written."""
    fsio.append_json_line(_path(run), change.to_file())


def end_by_resume(run: RunDir, values: Mapping[str, Any]) -> None:
    """Note that a resume has set these keys in ``config.yaml``.

    It ends the values that were set before.
    """
    path = _path(run)
    if values and path.exists():
        line = json.dumps(Change(time.time(), values).to_file()) + "\n"
        fsio.write_atomic(path, reading.read_text(path).rstrip("\n") + "\n" + line)


def in_force(changes: Iterable[Change]) -> list[tuple[int, str, Any]]:
    """Return the values in force as (first step, key, value), sorted by step.

    A later line overrides earlier ones: it ends what they have set for its keys at its step or after it. (A run that
    went back to a checkpoint may be given a new value before it comes to the step of an older one.)
    """
    held: list[tuple[int, str, Any]] = []
    for change in changes:
        begins = -1 if change.step is None else change.step
        held = [each for each in held if each[1] not in change.values or each[0] < begins]
        if change.step is not None:
            held += [(change.step, key, value) for key, value in change.values.items()]
    return sorted(held, key=lambda each: each[0])


def latest(held: Sequence[tuple[int, str, Any]]) -> dict[str, Any]:
    """Return the last value of each key."""
    return {key: value for _, key, value in held}


def rows(run: RunDir, damage: list[str]) -> list[dict[str, Any]]:
    """Return the values in force, for a JSON document."""
    return [{"step": step, "key": key, "value": value} for step, key, value in in_force(read(run, damage))]


def lines(held: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each of :func:`rows`."""
    return [f"since step {each['step']}: {each['key']}={written(each['value'])}" for each in held]


def written(value: Any) -> str:
    """Return a value as a config writes it."""
    return value if isinstance(value, str) else json.dumps(value)


def _path(run: RunDir) -> Path:
    return run.path / "changes.jsonl"
