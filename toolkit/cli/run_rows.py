"""Reads a run's own files into a row of `toolkit status`. Slurm is asked elsewhere, by `toolkit.cli.show`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from toolkit.base import fsio
from toolkit.base.errors import DamagedFileError
from toolkit.base.process_limits import limits
from toolkit.cli import notes
from toolkit.files import rundir
from toolkit.files.run_files import UNREADABLE, JobUsage, RunState
from toolkit.files.rundir import RunDir
from toolkit.metrics import goodput
from toolkit.run.records import stop_request, submitted_run

T = TypeVar("T")


@dataclass
class RunRow:
    """A row of `toolkit status`: a run, a point of a sweep, or a whole sweep."""

    run: str
    name: str
    path: str
    state: RunState | str = "unknown"  #: or UNREADABLE, or with what Slurm says, such as ``lost (FAILED)``
    job_id: str | None = None
    cluster: str = ""
    follow_ups: Sequence[str] = ()
    asked: str | None = None
    after: Sequence[str] = ()
    executor: str = "local"
    attempt: int = 0
    restarts: int = 0
    step: int | None = None
    total_steps: int | None = None
    loss: float | None = None
    samples_per_s: float | None = None
    eta_s: float | None = None
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    nodes: Sequence[str] = ()
    bad_nodes: Mapping[str, str] = field(default_factory=dict)
    ailing_nodes: Mapping[str, str] = field(default_factory=dict)
    save_error: str | None = None
    stragglers: Sequence[Mapping[str, Any]] = ()
    goodput: Mapping[str, float] | None = None
    usage: Mapping[str, Any] | None = None
    using: str = ""
    pid: int | None = None
    host: str | None = None
    birth: str = ""
    submitted: float | None = None
    updated: float | None = None
    ended: float | None = None
    why: str | None = None  #: why it ended, or which file cannot be read
    points: Mapping[str, int] | None = None  #: of a sweep's row: how many are in each state
    # What Slurm says, see `toolkit.cli.show.with_slurm`.
    slurm: str | None = None
    reason: str | None = None
    expected_start: float | None = None
    silent: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)  #: by dotted key, where a column asks for it


def read_rows(runs: Sequence[RunDir]) -> list[RunRow]:
    """Return the row of each run. A file that cannot be read is named in the run's row, and hides no other run."""
    return read_all(partial(_row_of, is_whole=len(runs) < limits().runs_read_whole), runs)


def read_all(read: Callable[[RunDir], T], runs: Sequence[RunDir]) -> list[T]:
    """Return what ``read`` returns for each run; of many in several processes."""
    if len(runs) < limits().runs_read_whole:
        return list(map(read, runs))
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import get_context

    try:
        with ProcessPoolExecutor(min(8, len(os.sched_getaffinity(0))), get_context("fork")) as pool:
            return list(pool.map(read, runs, chunksize=200))
    except BrokenProcessPool:  # a login node may allow a user few processes and little memory
        return list(map(read, runs))


def _row_of(run: RunDir, *, is_whole: bool) -> RunRow:
    try:
        return _row(run, is_whole)
    except (OSError, DamagedFileError) as error:
        return unreadable(run.id, run.name, run.path, error)


def unreadable(run: str, name: str, path: Path, error: Exception) -> RunRow:
    """Return the row of a run, or of a sweep, one of whose files cannot be read."""
    return RunRow(run, name, str(path), UNREADABLE, why=without_folder(path, str(error)))


def without_folder(path: Path, why: str | None) -> str | None:
    """Return an error with the file's name in its folder: the row has the path of that."""
    return why and why.replace(f"{path}/", "")


def _row(run: RunDir, is_whole: bool) -> RunRow:
    status, result = run.status(), run.result()
    progress, state = status.progress, status.state if result is None else result.state
    waits_for = run.after() if result is None else None
    row = RunRow(
        run.id,
        run.name,
        str(run.path),
        state or ("unknown" if status.why is None else UNREADABLE),  # without a state the file is torn
        job_id=status.job_id,
        cluster=status.cluster,
        after=waits_for.names() if waits_for is not None else [],
        executor="slurm" if status.job_id else "local",
        attempt=status.attempt or 0,
        restarts=max(0, ((result.attempts if result is not None else 0) or status.attempt or 1) - 1),
        step=progress.step if result is None or result.step is None else result.step,
        total_steps=progress.total_steps,
        loss=progress.loss,
        samples_per_s=progress.samples_per_s,
        eta_s=progress.eta_s if state is not None and state.has_ranks else None,
        metrics=result.metrics if result is not None and result.metrics else progress.metrics,
        nodes=status.nodes,
        bad_nodes=status.bad_nodes,
        ailing_nodes=status.ailing_nodes,
        save_error=progress.save_error if result is None else None,
        stragglers=notes.stragglers(status),
        goodput=result.goodput if result is not None and result.goodput else goodput.of_files(run),
        usage=None if status.usage is None else status.usage.to_json(),
        using=_using(status.usage),
        pid=status.pid,
        host=status.host,
        birth=status.birth,
        submitted=rundir.time_of_id(run.id),  # a requeued or resumed run has a job of a later submit time
        updated=status.updated,
        ended=status.ended if result is not None else None,
        why=result.why if result is not None else without_folder(run.path, status.why) if state is None else None,
    )
    if not run.config.exists():
        row.why = f"{run.config.name} is missing"
    # Which job has the run matters only while it may go on.
    if is_whole or result is None or status.job_id is None:
        jobs, sent, asked = submitted_run.of(run), run.submission(), stop_request.asked(run)
        row.job_id, row.follow_ups = (jobs.ids[0] if jobs.ids else status.job_id), list(jobs.ids[1:])
        row.cluster = jobs.cluster or status.cluster
        row.asked = asked and asked.value
        row.executor = row.executor if sent is None else sent.executor
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


#: The states of runs that have ended.
OVER = frozenset(str(state) for state in RunState if state.is_over)


def read_config(run: RunDir) -> dict[str, Any]:
    """Return the scalar values by their full keys of those keys that act on the run. A damaged config has none."""
    from toolkit.config import yaml_core
    from toolkit.run.prepare.run_keys import acting_on

    try:
        root = yaml_core.compose(fsio.read_text(run.config))
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
