"""Reads a run's own files into a row of `toolkit status`. Slurm is asked elsewhere, by `toolkit.cli.show`.

The rows of many runs are kept in a cache, an SQLite file that may be thrown away at any time. A row counts while the
files that it was read from have the same times, sizes and inodes. Rows with damage are not kept. The cache is read as
a whole and replaced as a whole, without locks: so it works on NFS, and a process that is killed leaves the old one.
"""

from __future__ import annotations

import marshal
import os
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.base import fsio, reading
from toolkit.base.user_cache import cache_dir
from toolkit.cli import slow
from toolkit.files import rundir
from toolkit.files.run_files import JobUsage, RunState
from toolkit.files.rundir import RunDir
from toolkit.metrics import goodput
from toolkit.run.records import changes, run_jobs, stop_request

#: The files that a row of an ended run is made of, and those of one that may go on.
_ENDED_FILES = ("status.json", "result.json")
_LIVE_FILES = (
    *(*_ENDED_FILES, "owner.json", "intent.json", "attempts.jsonl", "changes.jsonl"),
    *("submitit/submission.json", "config.yaml", "after.json"),
)
#: A file that was written this recently may change again within the tick of its file system's clock: such rows are not
#: kept.
_SETTLED_S = 3.0
#: The cache is written again when this many rows are new.
_WORTH_WRITING = 20
#: Processes are started to read this many runs.
_WORTH_PROCESSES = 1000
#: Fewer rows than this are looked for one by one.
_FEW = 500
#: Raise the 9 when a key of `_row` is new or has another meaning; new keys go into `EMPTY`, too. The rows are kept in
#: Python's own form, which it reads faster than JSON. A cache with another version is thrown away.
_VERSION = 100 * 9 + marshal.version


def read_row(run: RunDir) -> dict[str, Any]:
    """Return the row of a run, from all of its files. A damaged file is named in the row, not raised."""
    return _patient_row(run, is_whole=True)


def _quick_row(run: RunDir) -> dict[str, Any]:
    """Return the row of a run as the cache keeps it. Of an ended run only the files that matter are read."""
    # Values that the path or `EMPTY` holds are left out.
    row = _patient_row(run, is_whole=False)
    from_path = ("run", "name", "path")
    row["state"] = str(row["state"])
    return {name: value for name, value in row.items() if name not in from_path and value != EMPTY[name]}


def _whole(kept: dict[str, Any], path: str) -> dict[str, Any]:
    _, name, run_id = path.rsplit(os.sep, 2)
    row = {**EMPTY, "run": run_id, "name": name, "path": path, **kept}
    row["state"] = _STATES.get(row["state"], row["state"])
    return row


def _patient_row(run: RunDir, is_whole: bool) -> dict[str, Any]:
    damage: list[str] = []
    try:
        return _row(run, damage, is_whole)
    except OSError as error:
        return {**EMPTY, "run": run.id, "name": run.name, "path": str(run.path), "damage": [*damage, str(error)]}


def _row(run: RunDir, damage: list[str], is_whole: bool) -> dict[str, Any]:
    status, result = run.status(damage), run.result(damage)
    if not run.config.exists():
        damage.append(f"{run.config} is missing")
    progress, state = status.progress, status.state if result is None else result.state
    waits_for = run.after(damage) if result is None else None
    row: dict[str, Any] = {
        "run": run.id,
        "name": run.name,
        "state": state or "unknown",
        "job_id": status.job_id,
        "cluster": status.cluster,
        "follow_ups": [],
        "asked": None,
        "after": waits_for.names() if waits_for is not None else [],
        "executor": "slurm" if status.job_id else "local",
        "attempt": status.attempt or 0,
        "restarts": max(0, ((result.attempts if result is not None else 0) or status.attempt or 1) - 1),
        "step": progress.step if result is None or result.step is None else result.step,
        "total_steps": progress.total_steps,
        "loss": progress.loss,
        "samples_per_s": progress.samples_per_s,
        "eta_s": progress.eta_s if state is not None and state.has_ranks else None,
        "metrics": dict(result.metrics if result is not None and result.metrics else progress.metrics),
        "nodes": list(status.nodes),
        "bad_nodes": dict(status.bad_nodes),
        "ailing_nodes": dict(status.ailing_nodes),
        "save_error": progress.save_error if result is None else None,
        "stragglers": slow.stragglers(status),
        "goodput": dict(result.goodput) if result is not None and result.goodput else goodput.of_files(run, damage),
        "usage": status.usage and status.usage.to_json(),
        "using": _using(status.usage),
        "pid": status.pid,
        "host": status.host,
        "birth": status.birth,
        "submitted": rundir.time_of_id(run.id),  # a requeued or resumed run has a job of a later submit time
        "updated": status.updated,
        "ended": status.ended if result is not None else None,
        "why": result and result.why,
        "changes": changes.rows(run, damage),
        "points": None,
        "damage": damage,
        "path": str(run.path),
    }
    # Which job has the run matters only while it may go on.
    if is_whole or result is None or status.job_id is None or damage:
        jobs, sent = run_jobs.of(run, damage), run.submission(damage)
        asked = stop_request.asked(run, damage)
        row["job_id"], row["follow_ups"] = (jobs.ids[0] if jobs.ids else status.job_id), list(jobs.ids[1:])
        row["cluster"] = jobs.cluster or status.cluster
        row["asked"] = asked and asked.value
        row["executor"] = row["executor"] if sent is None else sent.executor
    return row


def _using(usage: JobUsage | None) -> str:
    """Say in a line what the job uses now; empty where nothing is known."""
    if usage is None or not usage.cpu_held_s:
        return ""
    limit = "" if usage.memory_bytes is None else f" of {fsio.size_text(usage.memory_bytes)}"
    memory = f"{fsio.size_text(usage.used_bytes)}{limit} of memory a node"
    parts = [f"{usage.busy_cpus:.1f} of {usage.cpus} CPUs", memory]
    if usage.gpu_held_s:
        gpus = usage.gpus_per_node * usage.nodes
        parts.append(f"{usage.busy_gpus:.1f} of {gpus} GPUs at {usage.power_w:.0f} W")
    return f"uses {', '.join(parts)}" + "".join(f"; {gpu} is unused" for gpu in usage.unused_gpus)


#: A row without facts, which also names all keys.
EMPTY: Mapping[str, Any] = {
    "run": "",
    "name": "",
    "state": "unknown",
    "job_id": None,
    "cluster": "",
    "follow_ups": [],
    "asked": None,
    "after": [],
    "executor": "local",
    "attempt": 0,
    "restarts": 0,
    "step": None,
    "total_steps": None,
    "loss": None,
    "samples_per_s": None,
    "eta_s": None,
    "metrics": {},
    "nodes": [],
    "bad_nodes": {},
    "ailing_nodes": {},
    "save_error": None,
    "stragglers": [],
    "goodput": None,
    "usage": None,
    "using": "",
    "pid": None,
    "host": None,
    "birth": "",
    "submitted": None,
    "updated": None,
    "ended": None,
    "why": None,
    "changes": [],
    "points": None,  # of a sweep's row: how many are in each state
    "damage": [],
    "path": "",
}


class RowCache:
    """The rows and configs of runs. ``path`` None keeps them in this process alone."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._database = _open(path)
        self._new_rows = 0  #: rows that the file does not have

    def rows(self, runs: Sequence[RunDir]) -> list[dict[str, Any]]:
        """Return the row of each run. A kept row of an ended run is checked by two files: its status and result."""
        kept = self._all("row", runs, _quick_row, _row_files)
        return [_whole(row, os.fspath(run.path)) for row, run in zip(kept, runs, strict=True)]

    def configs(self, runs: Sequence[RunDir]) -> list[dict[str, Any]]:
        """Return :func:`read_config` of each run."""
        return self._all("config", runs, read_config, lambda _: ("config.yaml",))

    def save(self) -> None:
        """Replace the file, if that is worth it. A disk that does not take it changes nothing."""
        if self._path is None or self._new_rows < _WORTH_WRITING:
            return
        self._database.commit()
        content = self._database.serialize()
        try:
            fsio.write_atomic(self._path, zlib.crc32(content).to_bytes(4, "big") + content, durable=False)
        except OSError:
            self._path = None
        self._new_rows = 0

    def _all(
        self,
        kind: str,
        runs: Sequence[RunDir],
        read: Callable[[RunDir], dict[str, Any]],
        files_of: Callable[[Mapping[str, Any]], Sequence[str]],
    ) -> list[dict[str, Any]]:
        paths = [os.fspath(run.path) for run in runs]
        values = self._known(kind, paths, files_of(EMPTY))
        unknown = {path: run for path, run in zip(paths, runs, strict=True) if path not in values}
        # Look at the files before they are read: a change meanwhile makes the row old at once.
        before = [_signature(path, files_of(EMPTY)) for path in unknown]
        found = _map(read, list(unknown.values()))
        for path, signature, value in zip(unknown, before, found, strict=True):
            values[path] = value
            # An error of the file system may pass, and then no file has changed.
            if signature is not None and value and not value.get("damage"):
                self._keep(kind, path, " ".join(signature.split()[: len(files_of(value))]), value)
        return [values[path] for path in paths]

    def _known(self, kind: str, paths: Sequence[str], files: Sequence[str]) -> dict[str, Any]:
        """Return the kept values whose files have not changed.

        The signature of an ended run covers fewer files, which are the first ones of ``files``.
        """
        wanted, values, ask = set(paths), dict[str, Any](), f"SELECT path, signature, value FROM {kind}"
        if len(paths) < _FEW:
            found = self._database.execute(f"{ask} WHERE path IN ({','.join('?' * len(paths))})", paths)
        else:
            found = self._database.execute(ask)
        for path, signature, value in found:
            if path in wanted and signature == _signature(path, files[: signature.count(" ") + 1]):
                values[path] = marshal.loads(value)
        return values

    def _keep(self, kind: str, path: str, signature: str, value: dict[str, Any]) -> None:
        insert = f"INSERT OR REPLACE INTO {kind} VALUES (?, ?, ?)"
        self._database.execute(insert, (path, signature, marshal.dumps(value)))
        self._new_rows += 1


def _map(read: Callable[[RunDir], dict[str, Any]], runs: Sequence[RunDir]) -> Iterable[dict[str, Any]]:
    """Return ``read`` of each run, read by several processes if there are many."""
    if len(runs) < _WORTH_PROCESSES:
        return map(read, runs)
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    with ProcessPoolExecutor(min(8, len(os.sched_getaffinity(0))), get_context("fork")) as pool:
        return list(pool.map(read, runs, chunksize=200))


def _row_files(row: Mapping[str, Any]) -> Sequence[str]:
    is_over = row.get("state") in OVER and row.get("executor") == "slurm"
    return _ENDED_FILES if is_over else _LIVE_FILES


_STATES = {str(state): state for state in RunState}
#: The states of runs that have ended.
OVER = frozenset(str(state) for state in RunState if state.is_over)


def _signature(path: str, files: Sequence[str]) -> str | None:
    """Return times, sizes and inodes of the files as text. None if one of them has changed only now."""
    parts, newest_ns = [], 0
    for name in files:
        try:
            found = os.stat(f"{path}/{name}")  # noqa: PTH116 (a Path would take ten times as long)
        except OSError:
            parts.append("-")
            continue
        newest_ns = max(newest_ns, found.st_mtime_ns)
        parts.append(f"{found.st_mtime_ns},{found.st_size},{found.st_ino}")
    return None if newest_ns / 1e9 > time.time() - _SETTLED_S else " ".join(parts)


def read_config(run: RunDir) -> dict[str, Any]:
    """Return the scalar values by their full keys of those keys that act on the run. A damaged config has none."""
    from toolkit.config import yaml_core
    from toolkit.run.prepare.run_keys import acting_on

    try:
        root = yaml_core.compose(reading.read_text(run.config))
        values = dict(_leaves(root, "")) if root is not None else {}
        acting = acting_on(run, str(values.get("job")), [str(word) for word in values.get("argv") or ()])
        return {key: value for key, value in values.items() if acting.include(key)}
    except (OSError, ValueError):
        return {}


def _leaves(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    from toolkit.config import yaml_core

    if isinstance(node.value, str):
        yield prefix, yaml_core.scalar_of(node)
    elif node.id == "mapping":
        for name, (_, value) in yaml_core.pairs_of(node).items():
            yield from _leaves(value, f"{prefix}.{name}" if prefix else name)
    else:
        yield prefix, [leaf for item in node.value for _, leaf in _leaves(item, "")]


def _open(path: Path | None) -> sqlite3.Connection:
    """Return the file's content as a database in memory. It is empty if the file is missing or damaged."""
    database = sqlite3.connect(":memory:")
    try:
        content = reading.read_bytes(path) if path is not None else b""
        if zlib.crc32(content[4:]).to_bytes(4, "big") == content[:4] and len(content) > 4:
            database.deserialize(content[4:])
            if database.execute("PRAGMA user_version").fetchone()[0] == _VERSION:
                return database
    except (OSError, sqlite3.Error):
        pass
    database = sqlite3.connect(":memory:")
    database.execute(f"PRAGMA user_version = {_VERSION}")
    for kind in ("row", "config"):
        database.execute(f"CREATE TABLE {kind} (path TEXT PRIMARY KEY, signature TEXT, value BLOB)")
    return database


def cache_of(root: Path) -> RowCache:
    """Return the cache of the runs under ``root``."""
    folder = cache_dir()
    name = f"runs-{zlib.crc32(os.fsencode(root)):08x}.sqlite"
    return RowCache(folder and folder / name)
