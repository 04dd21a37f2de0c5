"""Remembers which nodes have ended attempts, in ``.nodes.jsonl`` next to all runs of a user.

A node that has ended attempts of several runs is used last, and named. One run alone says little: its own program may
be at fault.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from toolkit.base import fsio, logs
from toolkit.base.durations import in_one_unit
from toolkit.base.errors import DamagedFileError
from toolkit.files import records
from toolkit.files.records import FileRecord
from toolkit.files.run_files import Moment, Word
from toolkit.files.rundir import RunDir

FILE = ".nodes.jsonl"
#: Nodes are repaired: what is older is no longer counted.
REMEMBERED_DAYS = 30
#: A node is doubtful when it has ended attempts of at least this many runs.
DOUBTFUL_RUNS = 2

log = logs.get(__name__)


@dataclass(frozen=True)
class NodeTrouble(FileRecord):
    """An attempt that a node has ended. ``time`` is in seconds since the epoch."""

    host: Word
    run: str
    time: Moment
    why: str


def note(run: RunDir, hosts: Mapping[str, str]) -> None:
    """Note that nodes have ended an attempt of ``run``, each with the reason. A full disk costs the note only."""
    try:
        for host, why in hosts.items():
            line = NodeTrouble(host=host, run=run.id, time=time.time(), why=why)
            fsio.append_shared_line(run.path.parent.parent / FILE, line.to_json())
    except OSError as error:
        log.warning("which node ended the attempt cannot be noted: %s", error)


def doubtful(root: Path) -> dict[str, str]:
    """Return the nodes that have ended attempts of several runs below ``root``, each with a line about them."""
    now, by_host = time.time(), defaultdict[str, list[NodeTrouble]](list)
    for trouble in records.read_lines(root / FILE, NodeTrouble, skips_damage=True):
        if now - trouble.time < REMEMBERED_DAYS * 86_400:
            by_host[trouble.host].append(trouble)
    found: dict[str, str] = {}
    for host, troubles in sorted(by_host.items()):
        runs = len({trouble.run for trouble in troubles})
        if runs < DOUBTFUL_RUNS:
            continue
        last = max(troubles, key=lambda trouble: trouble.time)
        days = (now - last.time) / 86_400
        ago = f"{days:.0f} days" if days >= 2 else in_one_unit(max(0.0, now - last.time))
        attempts = f"{len(troubles)} attempts of {runs} runs in {REMEMBERED_DAYS} days"
        found[host] = f"ended {attempts}, the last {ago} ago: {last.why}"
    return found


def doubtful_for(run: RunDir) -> dict[str, str]:
    """Return the :func:`doubtful` nodes of the folder of ``run``; none where the file cannot be read."""
    try:
        return doubtful(run.path.parent.parent)
    except (OSError, DamagedFileError) as error:
        log.warning("which nodes have ended attempts of other runs is not known: %s", error)
        return {}
