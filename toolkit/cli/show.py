"""The rows and page of `toolkit status`, and the form of JSON documents."""

from __future__ import annotations

import json
import shlex
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.base import fsio, terminal
from toolkit.base.errors import DamagedFileError, ToolkitError
from toolkit.base.process_limits import limits
from toolkit.base.procfs import Life
from toolkit.cli import columns, notes
from toolkit.cli.run_rows import OVER, RunRow, read_rows, without_folder
from toolkit.files import rundir
from toolkit.files.run_files import UNREADABLE, RunState, state_word
from toolkit.files.rundir import RunDir
from toolkit.metrics import goodput
from toolkit.run.records import ownership, submitted_run
from toolkit.run.records.submitted_run import HEARD_S, RunJobs, RunStanding
from toolkit.slurm import cluster_name

if TYPE_CHECKING:  # the module that asks Slurm is imported only when Slurm is asked
    from toolkit.slurm.jobs import JobStatus
    from toolkit.slurm.shared_queue import SharedQueue

#: More rows than this are counted by state.
MOST_UNCOUNTED = 20


def status_rows(runs: Sequence[RunDir]) -> list[RunRow]:
    """Return one row for each run, from its files. Slurm is asked, once for all, about those that wait or are quiet."""
    return with_slurm(read_rows(runs), ask_slurm)


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
    stands = dict[str, RunStanding]()
    for row in rows:
        if row.path not in jobs:
            continue
        try:
            stand = stands[row.path] = submitted_run.of_jobs(jobs[row.path], answers, here)
        except (OSError, DamagedFileError) as error:
            _note_unreadable(row, error)
            continue
        row.job_id, job = stand.job_id, stand.job
        row.why = row.why or _launch_failure(row, job)
        if job is not None:
            row.slurm, row.reason = job.state, job.reason
            row.expected_start = job.start_time if ownership.waits(job) else None
    for row in rows:
        # Most rows keep their state: Slurm was not asked, and their own files are recent.
        if row.slurm is None and not row.silent:
            continue
        if row.path in stands:
            stand = stands[row.path]
        elif row.executor == "slurm" and row.job_id:  # its job is on another cluster
            stand = RunStanding(Life.UNSEEN, row.job_id)
        else:
            try:
                stand = submitted_run.without_job(RunDir(Path(row.path)), row.executor)
            except (OSError, DamagedFileError) as error:
                _note_unreadable(row, error)
                continue
        is_forgotten = _quiet_s(row.updated) > HEARD_S
        row.state = stand.in_words(row.state, row.asked, is_silent=row.silent, is_forgotten=is_forgotten)
    return rows


def _note_unreadable(row: RunRow, error: Exception) -> None:
    row.state, row.why, row.silent = UNREADABLE, without_folder(Path(row.path), str(error)), False


def _quiet_s(updated: float | None) -> float:
    return time.time() - (updated or 0.0)


def as_json(value: Any) -> str:
    """Return one JSON document. A loss that is not a number becomes null: JSON has no other word for it."""
    try:
        return json.dumps(value, indent=2, allow_nan=False)
    except ValueError:
        return json.dumps(fsio.finite(value), indent=2, allow_nan=False)


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
    blind += f"`toolkit resume {row.run} cluster.exclude={node}` goes on without it"
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


def print_rows(rows: list[RunRow], names: Sequence[str] = (), width: int | None = None) -> None:
    """Print the rows as a table of at most ``width`` characters, with the columns ``names`` or the usual ones.

    Below it are all facts about a single run, in sentences, or the number of runs by state where there are many.
    """
    if not rows:
        print(f"no runs under {rundir.runs_root()}")
        return
    table = columns.table(rows, names, width)
    table.print()
    if len(rows) == 1:
        _print_one(rows[0])
        return
    if len(rows) > MOST_UNCOUNTED:
        terminal.say(count_by_state(rows))
    if table.is_cut and not names:
        terminal.say("`toolkit status RUN` shows all of one run, --wide shows all columns")


def _print_one(row: RunRow) -> None:
    """Print the notes, what to do next, the words of a script, where the time went and what is used."""
    run, state, lines = RunDir(Path(row.path)), str(row.state), notes.of(row)
    # Only its user brings such a run back.
    if state != RunState.COMPLETED and (state in OVER or state.startswith("lost")):
        from toolkit.run.attempt import advice  # reads configs

        lines.append(f"next: {advice.of(run, state)}")
    lines += [given_words(run), goodput.sentence(row.goodput)]
    if isinstance(row.state, RunState) and row.state.has_ranks:
        lines.append(row.using)
    for text in filter(None, lines):
        terminal.say(text)


def given_words(run: RunDir) -> str:
    """Return the arguments of a run's script, or the command of `toolkit exec`; empty for a run without any."""
    from toolkit import config as configs  # takes longer to import than the listing of many runs
    from toolkit.run.records import run_config

    config = run_config.read(run)
    if config is None:
        return ""
    words = shlex.join(configs.command_line(config))
    return words and f"{'command' if config.job == configs.FOREIGN_JOB else 'arguments'}: {words}"


def count_by_state(rows: Sequence[RunRow]) -> str:
    """Return how many rows are in each state, the most first."""
    counts = Counter(state_word(str(row.state)) for row in rows)
    return f"{len(rows)} runs: " + ", ".join(f"{count} {state}" for state, count in counts.most_common())
