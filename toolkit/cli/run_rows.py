"""Reads a run's own files into a row of `toolkit status`. Slurm is asked elsewhere, by `toolkit.cli.show`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from toolkit.base import fsio, reading
from toolkit.cli import notes
from toolkit.files import rundir
from toolkit.files.run_files import JobUsage, RunState
from toolkit.files.rundir import RunDir
from toolkit.metrics import goodput
from toolkit.run.records import stop_request, submitted_run

#: Processes are started to read this many runs. Of so many only the files that matter are read of an ended one.
_MANY = 1000


def read_rows(runs: Sequence[RunDir]) -> list[dict[str, Any]]:
    """Return the row of each run. A damaged file is named in the row, not raised."""
    return _map(partial(_patient_row, is_whole=len(runs) < _MANY), runs)


def read_configs(runs: Sequence[RunDir]) -> list[dict[str, Any]]:
    """Return :func:`read_config` of each run."""
    return _map(read_config, runs)


def _map(read: Callable[[RunDir], dict[str, Any]], runs: Sequence[RunDir]) -> list[dict[str, Any]]:
    if len(runs) < _MANY:
        return list(map(read, runs))
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    with ProcessPoolExecutor(min(8, len(os.sched_getaffinity(0))), get_context("fork")) as pool:
        return list(pool.map(read, runs, chunksize=200))


def _patient_row(run: RunDir, *, is_whole: bool) -> dict[str, Any]:
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
        "stragglers": notes.stragglers(status),
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
        "points": None,
        "damage": damage,
        "path": str(run.path),
    }
    # Which job has the run matters only while it may go on.
    if is_whole or result is None or status.job_id is None or damage:
        jobs, sent = submitted_run.of(run, damage), run.submission(damage)
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
    "points": None,  # of a sweep's row: how many are in each state
    "damage": [],
    "path": "",
}


#: The states of runs that have ended.
OVER = frozenset(str(state) for state in RunState if state.is_over)


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
