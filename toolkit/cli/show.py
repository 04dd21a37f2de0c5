"""The rows and page of `toolkit status`, and the form of JSON documents."""

from __future__ import annotations

import json
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.base import fsio, terminal
from toolkit.base.errors import DamagedFileError, ToolkitError
from toolkit.base.process_limits import limits
from toolkit.base.procfs import Life
from toolkit.cli import columns, notes
from toolkit.cli.run_rows import OVER, RunRow, read_rows
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


def status_rows(runs: Sequence[RunDir]) -> list[RunRow]:
    """Return one row for each run, from its own files.

    Slurm is asked, once for all, about runs that wait or are quiet.
    """
    return with_slurm(read_rows(runs), ask_slurm)


def with_slurm(rows: list[RunRow], ask: Callable[[list[str]], Mapping[str, JobStatus | None]]) -> list[RunRow]:
    """Return the rows with Slurm's answers about those that wait or are quiet.

    ``ask`` is called once, and only if there are such rows.
    """
    for row in rows:
        goes_on = isinstance(row.state, RunState) and not row.state.is_over
        row.silent = goes_on and _quiet_s(row.updated) > limits().supervisor_silent_s
    asked = []
    for row in rows:
        state = row.state
        # Skip ended runs, and those whose files do not say how they stand.
        if row.executor != "slurm" or not isinstance(state, RunState) or state.is_over:
            continue
        if state.is_waiting or _quiet_s(row.updated) > limits().supervisor_quiet_s:
            asked.append(row)
    # A run may have follow-up jobs: ask about all of them, then show the one that is present.
    jobs, here = _jobs_here(asked)
    answers = ask([job for of_run in jobs.values() for job in of_run.ids]) if jobs else {}
    stands = dict[str, RunStanding]()
    for row in asked:
        if row.path not in jobs:
            continue
        try:
            stand = stands[row.path] = submitted_run.of_jobs(jobs[row.path], answers, here)
        except (OSError, DamagedFileError) as error:
            row.state, row.why, row.silent = UNREADABLE, str(error).replace(f"{row.path}/", ""), False
            continue
        row.job_id, job = stand.job_id, stand.job
        row.why = row.why or _launch_failure(row, job)
        if job is not None:
            row.slurm, row.reason = job.state, job.reason
            row.expected_start = job.start_time if ownership.waits(job) else None
    for row in rows:
        # Most rows keep their state: Slurm was not asked, and their own files are recent.
        if row.slurm is not None or row.silent:
            stand = stands.get(row.path) or _without_job(row)
            is_forgotten = _quiet_s(row.updated) > HEARD_S
            row.state = stand.in_words(row.state, row.asked, is_silent=row.silent, is_forgotten=is_forgotten)
    return rows


def _without_job(row: RunRow) -> RunStanding:
    """Judge a run without a job here, or with one of another cluster."""
    if row.executor == "slurm" and row.job_id:
        return RunStanding(Life.UNSEEN, row.job_id)
    return submitted_run.without_job(RunDir(Path(row.path)), row.executor)


def _jobs_here(rows: Sequence[RunRow]) -> tuple[dict[str, RunJobs], str]:
    """Return the jobs of each run, by its folder, and the name of this cluster, as far as it matters.

    Those of another cluster cannot be asked about here.
    """
    found = {}
    for row in rows:
        if row.job_id:
            ids = (row.job_id, *row.follow_ups)
            found[row.path] = RunJobs(RunDir(Path(row.path)), ids, row.cluster)
    here = cluster_name.name_here() if any(jobs.cluster for jobs in found.values()) else ""
    return {path: jobs for path, jobs in found.items() if not jobs.is_elsewhere(here)}, here


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
            f"then `toolkit resume {row.run}` goes on. Else {blind}"
        )
    # Since 23.02: the script has failed before its supervisor wrote a status, or a log where this machine sees it.
    if job.state != "FAILED" or row.state not in (RunState.QUEUED, RunState.REQUEUED):
        return None
    if RunDir(Path(row.path)).has_log_of(job.job_id, job.start_time):
        return None
    return f"job {job.job_id} has failed on {node} and has written nothing; {blind}"


def print_rows(rows: list[RunRow], names: Sequence[str] = (), width: int | None = None) -> None:
    """Print the rows as a table of at most ``width`` characters, with the columns ``names`` or the usual ones.

    Of one run all is told below the table, in sentences. Many are counted by state.
    """
    if not rows:
        print(f"no runs under {rundir.runs_root()}")
        return
    table = columns.table(rows, names, width)
    table.print()
    if len(rows) == 1:
        for text in (*notes.of(rows[0]), *_of_one(rows[0])):
            terminal.say(text)
        return
    if len(rows) > MOST_UNCOUNTED:
        terminal.say(count_by_state(rows))
    if table.is_cut and not names:
        terminal.say("`toolkit status RUN` tells all of one run, --wide shows all columns")


def _of_one(row: RunRow) -> Iterator[str]:
    """Yield what to do next, the words of a script, where the time went and what is used."""
    yield from _next(row)
    is_running = isinstance(row.state, RunState) and row.state.has_ranks
    told = [given_words(RunDir(Path(row.path))), goodput.sentence(row.goodput)]
    yield from filter(None, [*told, row.using if is_running else ""])


def _next(row: RunRow) -> list[str]:
    """Return what to do next about a run that only its user brings back; nothing for others."""
    state = str(row.state)
    if state == RunState.COMPLETED or (state not in OVER and not state.startswith("lost")):
        return []
    from toolkit.run.attempt import advice  # reads configs

    return [f"next: {advice.of(RunDir(Path(row.path)), state)}"]


def given_words(run: RunDir) -> str:
    """Return the arguments of a run's script, or the command of `toolkit exec`; empty for a run without any."""
    from toolkit import config as configs  # takes longer to import than the listing of many runs
    from toolkit.run.records import run_config

    config = run_config.read(run)
    if config is None:
        return ""
    words = shlex.join(configs.command_line(config))
    return words and f"{'command' if config.job == configs.FOREIGN_JOB else 'arguments'}: {words}"


#: More rows than this are counted by state.
MOST_UNCOUNTED = 20


def count_by_state(rows: Sequence[RunRow]) -> str:
    """Return how many rows are in each state, the most first."""
    counts = Counter(state_word(str(row.state)) for row in rows)
    return f"{len(rows)} runs: " + ", ".join(f"{count} {state}" for state, count in counts.most_common())
