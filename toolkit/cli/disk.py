"""`toolkit gc` and `toolkit rm`: the disk that runs take, and their removal."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.base import fsio, terminal
from toolkit.base.errors import DamagedFileError, RequestError, ToolkitError
from toolkit.base.fsio import size_text
from toolkit.cli import columns, run_rows, tables
from toolkit.cli.columns import is_over
from toolkit.cli.run_rows import status_rows
from toolkit.files import origin, rundir
from toolkit.files.run_files import UNREADABLE, DependencyRecord
from toolkit.files.rundir import RunDir
from toolkit.run.records.submitted_run import HEARD_S
from toolkit.run.submission.handle import attach


def usage(run: RunDir, before: float = 0.0) -> dict[str, Any]:
    """Return the run's disk use, when its files were last written and read, and how many of them a purge would remove.

    A file with several links counts by its share: sources that runs have in common are linked. A site's purge removes
    files that were not read or written since ``before``.
    """
    found = {"bytes": 0.0, "checkpoint_bytes": 0.0, "files": 0, "written": 0.0, "read": 0.0, "purged_files": 0}
    checkpoints = os.fspath(run.checkpoints)
    for folder, _, names in os.walk(run.path):
        for name in names:
            try:
                status = os.lstat(f"{folder}/{name}")
            except OSError:  # it is removed at this moment
                continue
            size = status.st_blocks * 512 / max(1, status.st_nlink)
            used = max(status.st_atime, status.st_mtime)
            found["bytes"] += size
            found["checkpoint_bytes"] += size if folder.startswith(checkpoints) else 0
            found["files"] += 1
            found["written"] = max(found["written"], status.st_mtime)
            found["read"] = max(found["read"], used)
            found["purged_files"] += used < before and stat.S_ISREG(status.st_mode)
    return found


def rows(runs: Sequence[RunDir], older_than_s: float | None) -> list[dict[str, Any]]:
    """Return a row for each run, the largest first.

    ``removed`` marks the runs that ``toolkit gc --older-than`` would remove.
    """
    before = 0.0 if older_than_s is None else time.time() - older_than_s
    # Before any file of a run is read: reading it, as the next lines do, changes the time that a purge goes by.
    used = [usage(run, before) for run in runs]
    origins = {} if older_than_s is None else used_origins()
    found = []
    for run, row, size in zip(runs, status_rows(runs), used, strict=True):
        removed = size["written"] < before and is_over(row) and _why_kept(run, origins) is None
        known = {"run": run.id, "name": run.name, "state": row.state, **size}
        found.append({**known, "removed": removed, "path": str(run.path)})
    return sorted(found, key=lambda each: -each["bytes"])


def used_origins() -> dict[Path, str]:
    """Return the paths that unfinished runs start from or wait for, each with words about a run that needs it."""
    runs = rundir.all_runs()
    users = dict[RunDir, str]()
    for run, row in zip(runs, status_rows(runs), strict=True):
        if row.state == UNREADABLE:  # it may be unfinished
            users[run] = f"run {run.id}, which cannot be read,"
        elif not is_over(row):
            users[run] = f"run {run.id}, which has not ended,"
    found = dict[Path, str]()
    configs = run_rows.map_runs(run_rows.read_config, [*users])
    for (run, user), config in zip(users.items(), configs, strict=True):
        with contextlib.suppress(ToolkitError):  # it is gone already
            if text := config.get("model.init_from"):
                found[origin.find(str(text)).path.resolve()] = user
        waits_for = DependencyRecord.read_or_none(run.after_path)  # a damaged one keeps no other run from being removed
        found |= {Path(path).resolve(): user for path in (waits_for.runs if waits_for is not None else ())}
    return found


def refuse(run: RunDir, used: Mapping[Path, str]) -> None:
    """Raise RequestError for a run that must not be removed.

    It may still run, be needed by another run, or not be a run's own folder. ``used`` is :func:`used_origins`.
    """
    why = _why_kept(run, used)
    if why is not None:
        raise RequestError(f"{why}; it is not removed")


def _why_kept(run: RunDir, used: Mapping[Path, str]) -> str | None:
    """Return why the folder must not be removed; None if it may be."""
    try:
        return _use_of(run, used)
    except DamagedFileError as error:  # whether it runs is not known
        return str(error)


def _use_of(run: RunDir, used: Mapping[Path, str]) -> str | None:
    if run.path.is_symlink():
        return f"{run.path} is a symbolic link, and not the run's own folder"
    if not rundir.is_run_id(run.id):
        return f"{run.path} is not named as the folder of a run is, such as 20260131-120000-1a2b3c4d"
    if _lives(run):
        how = "end its processes where they run"
        with contextlib.suppress(ToolkitError):  # it has no owner
            handle = attach(run)
            if (why := handle.unknown_state_advice()) is not None:
                return why
            how = handle.how_to_end()
        state = status_rows([run])[0].state
        return (
            f"run {run.id} is {state}; when it has ended it can be removed: {how} "
            f"(if its job was killed, wait until its status is {HEARD_S:.0f} s old)"
        )
    path = run.path.resolve()
    user = next((user for source, user in used.items() if path in (source, *source.parents)), None)
    return user and f"{user} needs run {run.id} (model.init_from, or --after)"


def remove(run: RunDir) -> None:
    """Remove a run that is over, with its checkpoints. Raises RequestError for one that runs, or may run."""
    refuse(run, {})
    run.remove()


def complete_removals(root: Path) -> None:
    """Remove what is left of runs below ``root`` whose removal was interrupted: no listing shows it."""
    for removed in root.glob("*/.removed-*"):
        with contextlib.suppress(OSError):
            fsio.remove_tree(removed)


def _lives(run: RunDir) -> bool:
    """True if a process may still write the run's files."""
    if run.result() is not None:
        return False
    try:
        handle = attach(run)
    except ToolkitError:  # never submitted, or by a user's own batch script: its status says whether it lives
        return not is_over(status_rows([run])[0])
    # Which cluster has the job may be unknown, and then Slurm here does not know the job.
    return (handle.executor == "slurm" and handle.status_age_s() < HEARD_S) or not handle.is_over()


def print_page(rows: Sequence[dict[str, Any]], going: Sequence[dict[str, Any]], args: Namespace) -> None:
    """Print the rows for a terminal, and what is or would be removed."""
    cells = [("RUN", "NAME", "STATE", "DISK", "CHECKPOINTS", "FILES", "CHANGED", "PURGED")]
    width = tables.width(args)
    for row in rows:
        run, written = row["run"] if width is None else tables.short(row["run"]), columns.ago(row["written"])
        sizes = (size_text(row["bytes"]), size_text(row["checkpoint_bytes"]), str(row["files"]))
        # Without --older-than nothing is known about a purge.
        purged = "" if args.older_than is None else f"{row['purged_files']} files"
        cells.append((run, row["name"], str(row["state"]), *sizes, written, purged))
    tables.Table(cells, width, ("FILES", "CHECKPOINTS")).print()
    lines = [f"{len(rows)} runs take {size_text(sum(row['bytes'] for row in rows))}"]
    if args.older_than is not None:
        size = size_text(sum(row["bytes"] for row in going))
        did = "removed" if args.remove else "would be removed by --remove"
        lines.append(f"{len(going)} runs that are over have not changed for {args.older_than}: {size} {did}")
        lines.append(f"PURGED: files that a purge takes of what nobody has read or written for {args.older_than}")
    terminal.say("\n".join(lines))
