"""The rows of `toolkit status`: a run's own files first, then Slurm's answer about those that wait or are quiet."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from toolkit.base import fsio, logs
from toolkit.base.errors import DamagedFileError, ToolkitError
from toolkit.base.process_limits import limits
from toolkit.base.procfs import Liveness
from toolkit.files import rundir
from toolkit.files.run_files import UNREADABLE, JobUsage, RunState, RunStatus
from toolkit.files.rundir import RunDir
from toolkit.metrics import goodput
from toolkit.run.records import submitted_run, user_requests
from toolkit.run.records.submitted_run import HEARD_S, RunJobs, RunLiveness
from toolkit.slurm import cluster_name

if TYPE_CHECKING:  # the module that asks Slurm is imported only when Slurm is asked
    from toolkit.slurm.jobs import JobStatus
    from toolkit.slurm.shared_queue import SharedQueue

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
    #: a script's OutputFigures, from which the figures above are
    printed: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    nodes: Sequence[str] = ()
    bad_nodes: Mapping[str, str] = field(default_factory=dict)
    degraded_nodes: Mapping[str, str] = field(default_factory=dict)
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
    # What Slurm says, see :func:`with_slurm`.
    slurm: str | None = None
    reason: str | None = None
    expected_start: float | None = None
    silent: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)  #: by dotted key, where a column asks for it


def read_rows(runs: Sequence[RunDir]) -> list[RunRow]:
    """Return the row of each run. A file that cannot be read is named in the run's row, and hides no other run."""
    return map_runs(partial(_row_of, is_whole=len(runs) < limits().runs_read_whole), runs)


def map_runs(read: Callable[[RunDir], T], runs: Sequence[RunDir]) -> list[T]:
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
        return unreadable_row(run.id, run.name, run.path, error)


def unreadable_row(run: str, name: str, path: Path, error: Exception) -> RunRow:
    """Return the row of a run, or of a sweep, one of whose files cannot be read."""
    return RunRow(run, name, str(path), UNREADABLE, why=relative_error(path, str(error)))


def relative_error(path: Path, why: str | None) -> str | None:
    """Return an error with the file's name in its folder: the row has the path of that."""
    return why and why.replace(f"{path}/", "")


def _row(run: RunDir, is_whole: bool) -> RunRow:
    status, result = run.status(), run.result()
    progress, state = status.shown, status.state if result is None else result.state
    waits_for = run.dependencies() if result is None else None
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
        printed=status.printed.to_json() if status.is_guess else {},
        metrics=result.metrics if result is not None and result.metrics else progress.metrics,
        nodes=status.nodes,
        bad_nodes=status.bad_nodes,
        degraded_nodes=status.degraded_nodes,
        save_error=progress.save_error if result is None else None,
        stragglers=stragglers(status),
        goodput=result.goodput if result is not None and result.goodput else goodput.of_files(run),
        usage=None if status.usage is None else status.usage.to_json(),
        using=_using(status.usage),
        pid=status.pid,
        host=status.host,
        birth=status.birth,
        submitted=rundir.time_of_id(run.id),  # a requeued or resumed run has a job of a later submit time
        updated=status.updated,
        ended=status.ended if result is not None else None,
        why=result.why if result is not None else relative_error(run.path, status.why) if state is None else None,
    )
    if not run.config.exists():
        row.why = f"{run.config.name} is missing"
    # Which job has the run matters only while it may continue.
    if is_whole or result is None or status.job_id is None:
        jobs, sent, asked = submitted_run.run_jobs(run), run.submission(), user_requests.read_intent(run)
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


def stragglers(status: RunStatus) -> list[dict[str, Any]]:
    """Return the newest attempt's stragglers, each with ``slow_s``. ``until`` is None for those that are slow now."""
    now, rows = status.updated or 0.0, list[dict[str, Any]]()
    for straggler in status.progress.stragglers:
        # A straggler of an attempt that has ended was slow until that end.
        until = straggler.until or status.ended
        slow_s = round((until or now) - straggler.since, 1)
        rows.append({**straggler.to_json(), "until": until, "slow_s": slow_s})
    return rows


log = logs.get(__name__)

#: The states of runs that have ended.
OVER = frozenset(str(state) for state in RunState if state.is_over)


def status_rows(runs: Sequence[RunDir]) -> list[RunRow]:
    """Return one row for each run, from its files. Slurm is asked, once for all, about those that wait or are quiet."""

    def ask(jobs: Sequence[str]) -> Mapping[str, JobStatus | None]:
        answers = ask_slurm(jobs)
        if not answers:  # else each job has one
            log.warning("Slurm does not answer: the state of waiting and silent runs is from their own files")
        return answers

    return with_slurm(read_rows(runs), ask)


def with_slurm(rows: list[RunRow], ask: Callable[[list[str]], Mapping[str, JobStatus | None]]) -> list[RunRow]:
    """Return the rows with Slurm's answers about those that wait or are quiet.

    ``ask`` is called once, and only if there are such rows.
    """
    jobs = dict[str, RunJobs]()
    for row in rows:
        state, row.silent = row.state, False
        if not isinstance(state, RunState) or state.is_over:  # or its files do not say how it stands
            continue
        row.silent = _quiet_s(row.updated) > limits().supervisor_silent_s
        is_in_doubt = state.is_waiting or _quiet_s(row.updated) > limits().supervisor_quiet_s
        if is_in_doubt and row.executor == "slurm" and row.job_id:
            # A run may have follow-up jobs: ask about all of them, then show the current one.
            jobs[row.path] = RunJobs(RunDir(Path(row.path)), (row.job_id, *row.follow_ups), row.cluster)
    here = cluster_name.name_here() if any(of_run.cluster for of_run in jobs.values()) else ""
    # Those of another cluster cannot be asked about here.
    jobs = {path: of_run for path, of_run in jobs.items() if not of_run.is_elsewhere(here)}
    answers = ask([job for of_run in jobs.values() for job in of_run.ids]) if jobs else {}
    stands = dict[str, RunLiveness]()
    for row in rows:
        if row.path not in jobs:
            continue
        try:
            stand = stands[row.path] = submitted_run.liveness_by_jobs(jobs[row.path], answers, here)
        except (OSError, DamagedFileError) as error:
            _note_unreadable(row, error)
            continue
        row.job_id, job = stand.job_id, stand.job
        row.why = row.why or _launch_failure(row, job)
        if job is not None:
            row.slurm, row.reason = job.state, job.reason
            row.expected_start = job.start_time if submitted_run.is_queued(job) else None
    for row in rows:
        # Most rows keep their state: Slurm was not asked, and their own files are recent.
        if row.slurm is None and not row.silent:
            continue
        if row.path in stands:
            stand = stands[row.path]
        elif row.executor == "slurm" and row.job_id:  # its job is on another cluster
            stand = RunLiveness(Liveness.UNSEEN, row.job_id)
        else:
            try:
                stand = submitted_run.liveness_without_job(RunDir(Path(row.path)), row.executor)
            except (OSError, DamagedFileError) as error:
                _note_unreadable(row, error)
                continue
        is_forgotten = _quiet_s(row.updated) > HEARD_S
        row.state = stand.in_words(row.state, row.asked, is_silent=row.silent, is_forgotten=is_forgotten)
    return rows


def _note_unreadable(row: RunRow, error: Exception) -> None:
    row.state, row.why, row.silent = UNREADABLE, relative_error(Path(row.path), str(error)), False


def _quiet_s(updated: float | None) -> float:
    return time.time() - (updated or 0.0)


def ask_slurm(
    job_ids: Sequence[str], queue: SharedQueue | None = None, every_s: float | None = None
) -> dict[str, JobStatus | None]:
    """Return Slurm's answer about each job. All processes of the user share the answers.

    None for a job that it does not know. A controller that does not answer leaves all of them out, which never means
    "dead".
    """
    from toolkit.slurm import shared_queue

    try:
        return (queue or shared_queue.of_user()).show_jobs(job_ids, every_s or shared_queue.FRESH_S)
    except ToolkitError:
        return {}


def _launch_failure(row: RunRow, job: JobStatus | None) -> str | None:
    """Return what to do about a job whose supervisor has not started. None if that is not the trouble.

    Where the batch host has no folder for the job's log, Slurm 22.05 does not start the batch script. Since 23.02 Slurm
    makes the folder, on the node's own disk if the shared one is not mounted: the script finds no run and fails.
    """
    from toolkit.base import hostlist

    if job is None or not job.is_over:
        return None
    node = next(iter(hostlist.expand(job.node_list)), "its first node")
    blind = f"most likely {node} does not see {row.path}: "
    blind += f"`toolkit resume {row.run} cluster.exclude={node}` continues without it"
    if job.reason == "JobLaunchFailure":
        return (
            f"Slurm could not start job {job.job_id} on {node}, and has given it up. If the disk is full, make room, "
            f"then `toolkit resume {row.run}` continues it. Else {blind}"
        )
    # Since 23.02: the script has failed before its supervisor wrote a status, or a log where this machine sees it.
    if job.state != "FAILED" or row.state not in (RunState.QUEUED, RunState.REQUEUED):
        return None
    if RunDir(Path(row.path)).has_log_of(job.job_id, job.start_time):
        return None
    return f"job {job.job_id} has failed on {node} and has written nothing; {blind}"


def given_words(run: RunDir) -> str:
    """Return the arguments of a run's script, or the command of `toolkit exec`; empty for a run without any."""
    from toolkit import config as configs  # takes longer to import than the listing of many runs
    from toolkit.run.records import run_config

    config = run_config.read(run)
    if config is None:
        return ""
    words = shlex.join(configs.command_line(config))
    return words and f"{'command' if config.job == configs.SCRIPT_JOB else 'arguments'}: {words}"


def read_config(run: RunDir) -> dict[str, Any]:
    """Return the scalar values by their full keys of those keys that act on the run. A damaged config has none."""
    from toolkit.config import yaml_core
    from toolkit.run.prepare.snapshot import acting_on

    try:
        root = yaml_core.compose(fsio.read_text(run.config))
        values = dict(_leaves(root, "")) if root is not None else {}
        acting = acting_on(run, str(values.get("job")), [str(word) for word in values.get("argv") or ()])
        return {key: value for key, value in values.items() if acting.has_effect(key)}
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
