"""The follow-up jobs of a run whose job Slurm will not requeue.

Either the job may not be requeued (``--no-requeue``, ``JobRequeue=0``), or a preemption cancels it where it runs,
perhaps before its supervisor could act (``PreemptMode=CANCEL``, ``GraceTime=0``).

Two follow-up jobs wait while a job runs, each for the end of all jobs before it. One is not enough: it may be preempted
as well, before it could submit the next one. The first is submitted together with the run's job, the others when a job
starts: a compute node that is about to be taken away may have no time left for an ``sbatch``.

A follow-up job first checks what became of the jobs before it. It takes the run over if they were preempted, timed out
or lost a node, and ends at once if the run is over. So it never revives a cancelled run.

It asks for what its predecessor's batch script has asked for. The environment of a job and `scontrol show job` tell its
size, nodes and GPUs, not how these are to be connected, whom to mail, or how tasks share cores. Slurm keeps the script
itself.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from toolkit.base import fsio, logs, outages, staged
from toolkit.base.errors import EXIT_STOPPED, SlurmError
from toolkit.config import JobConfig, cluster, load_config
from toolkit.config.validation import may_lose_nodes
from toolkit.files.run_files import RunState
from toolkit.files.rundir import RunDir
from toolkit.run.attempt.journal import write_ended
from toolkit.run.job.slurm_job import JobOutcome, outcome_of_row
from toolkit.run.prepare import snapshot
from toolkit.run.records import ownership, user_requests
from toolkit.slurm.commands import Settings, Slurm, SlurmCommands
from toolkit.slurm.environment import component_environments, whole_number
from toolkit.slurm.jobs import JobRow

RUN_VARIABLE = "TOOLKIT_SUPERVISE_RUN"
#: The jobs whose end a follow-up job has waited for, the run's own first, with colons between them.
PREDECESSORS_VARIABLE = "TOOLKIT_PREDECESSORS"
#: The number of follow-up jobs that wait while a job runs.
COUNT = 2

#: sbatch's options, by the variables that describe the current job in its environment.
_VARIABLE_OF: Mapping[str, str] = {
    "job-name": "SLURM_JOB_NAME",
    "partition": "SLURM_JOB_PARTITION",
    "account": "SLURM_JOB_ACCOUNT",
    "reservation": "SLURM_JOB_RESERVATION",
    "nodes": "SLURM_JOB_NUM_NODES",
    "ntasks": "SLURM_NTASKS",
    "ntasks-per-node": "SLURM_NTASKS_PER_NODE",
    "ntasks-per-gpu": "SLURM_NTASKS_PER_GPU",
    "cpus-per-task": "SLURM_CPUS_PER_TASK",
    "mem": "SLURM_MEM_PER_NODE",
    "mem-per-cpu": "SLURM_MEM_PER_CPU",
    "clusters": "SLURM_CLUSTERS",
}
#: Flags that concern one job's place in the queue, or are set for every follow-up job anyway. Under ``--time-min`` each
#: job might get less time than the one before.
_NOT_INHERITED = ("hold", "begin", "dependency", "no-requeue", "requeue", "time-min")

log = logs.get(__name__)


#: A line of a batch script. Without it a signal that comes before the supervisor has its handlers ends the job without
#: a result. The supervisor learns from the request's file, or from Slurm's row of the job, what it was about.
IGNORE_SIGNALS = "trap '' HUP INT TERM USR1 USR2"


# ------------------------------------------------------------------------------------------------------- submitting


def are_needed(row: JobRow, settings: Settings, slurm: SlurmCommands) -> bool:
    """True if Slurm may end the job for good, without a requeue. Raises SlurmError."""
    return not row.can_requeue or slurm.preemption_cancels(row, settings)


def submit(run: RunDir, slurm: SlurmCommands, script: str, after: Sequence[str], options: Iterable[str] = ()) -> str:
    """Submit a job with this script that starts when all jobs of ``after`` have ended. Return its id.

    Raises SlurmError where sbatch refuses (the site does not let compute nodes submit, the user has too many jobs), and
    OSError where the disk is full.
    """
    path = run.submitit / f"follow-up-{secrets.token_hex(4)}.sh"
    output = f"--output={run.logs}/follow-up-%j.out"
    wait = f"--dependency=afterany:{':'.join(after)}"
    fsio.write_atomic(path, script)
    job_id = slurm.sbatch(["--no-requeue", wait, output, "--open-mode=append", *options, str(path)])
    log.info("job %s waits to take over after job %s", job_id, ", ".join(after))
    return job_id


def submit_like_ours(run: RunDir, row: JobRow, waiting: Sequence[str], slurm: SlurmCommands, token: str) -> str:
    """Submit a job like the present one, from inside it. It follows this job and those that wait for it.

    Raises what :func:`submit` raises.
    """
    # Set the variables that the submission set for the first job.
    variables = snapshot.job_environment(run, os.environ, token) | environment(run, [row.requeue_id, *waiting])
    exports = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    body = "\n".join([IGNORE_SIGNALS, *exports, command(run), ""])
    lines = script_lines(row.job_id)
    ask = partial(submit, run, slurm, after=[row.job_id, *waiting], options=options_of_job(os.environ, row, run))
    try:
        return ask("\n".join(["#!/bin/bash", *lines, body]))
    except SlurmError:
        if not lines:
            raise
    # sbatch refuses those lines now: a follow-up job is worth more than its place.
    return ask(f"#!/bin/bash\n{body}")


def environment(run: RunDir, predecessors: Sequence[str]) -> dict[str, str]:
    return {RUN_VARIABLE: str(run.path), PREDECESSORS_VARIABLE: ":".join(predecessors)}


def command(run: RunDir) -> str:
    """Return the last line of the batch script. It uses exec: the first SIGTERM would end a bash, and all with it."""
    return f"exec {shlex.quote(str(staged.origin(sys.executable)))} -m toolkit supervise {shlex.quote(str(run.config))}"


def options_of_job(environ: Mapping[str, str], row: JobRow, run: RunDir) -> list[str]:
    """Return sbatch's options for another job like the current one, with a colon between those of two components."""
    first, *others = options_of_components(environ, row, run)
    return [*first, *(option for each in others for option in (":", *each))]


def options_of_components(environ: Mapping[str, str], row: JobRow, run: RunDir) -> list[list[str]]:
    """Return sbatch's options for another job like the present one, for each of its components."""
    parts = component_environments(environ)
    nodes = sum(whole_number(part, "SLURM_JOB_NUM_NODES", 1) for part in parts)
    rows = (row, *row.others)
    return [[*_options_of_component(part, own, run, nodes)] for part, own in zip(parts, rows, strict=False)]


def _options_of_component(environ: Mapping[str, str], row: JobRow, run: RunDir, nodes: int) -> Iterator[str]:
    present = [f"--{option}={environ[name]}" for option, name in _VARIABLE_OF.items() if environ.get(name)]
    # sbatch refuses both, and a site may have added the second.
    has_own = bool(environ.get("SLURM_CPUS_PER_TASK"))
    present += [text for text in row.options if not (has_own and text.startswith("--cpus-per-gpu="))]
    yield from present
    # Of a flag given twice sbatch takes the last: a gres of ``cluster.extra`` would replace the job's, which has GPUs.
    given = {option.partition("=")[0] for option in present}
    # Neither environment nor Slurm tells of these. For what a batch script has besides: script_lines().
    has_config = outages.retry_write(lambda: fsio.is_there(run.config), run.config, "read")
    config = load_config(run.config, site=False) if has_config else JobConfig()
    if may_lose_nodes(config, nodes) and whole_number(environ, "SLURM_JOB_NUM_NODES", 1) > 1:
        yield "--no-kill"
    for key, value in config.cluster.extra.items():
        flag = str(key).replace("_", "-")
        if f"--{flag}" not in given and not is_for_one_job(flag) and value is not False:
            yield f"--{flag}" if value is True else f"--{flag}={value}"
    if row.time_limit_s is not None:
        yield f"--time={max(1, round(row.time_limit_s / 60))}"


def is_for_one_job(key: str) -> bool:
    """True for a key of ``cluster.extra`` that a follow-up job does not get."""
    return str(key).replace("_", "-") in _NOT_INHERITED


# -------------------------------------------------------------------------------------------- those that are waiting


def prune_waiting(jobs: Sequence[str], slurm: SlurmCommands) -> list[str]:
    """Return the jobs up to the first that is over, and cancel those behind it. A user has cancelled that job.

    A controller that does not answer says nothing about them: then return all of them.
    """
    try:
        statuses = slurm.show_jobs(jobs) if jobs else {}
    except SlurmError:
        return list(jobs)
    over = [status is None or status.is_over for status in map(statuses.get, jobs)]
    count = over.index(True) if True in over else len(over)
    if count < len(jobs):
        log.warning("the follow-up job %s was cancelled", jobs[count])
        dismiss([job for job, is_over in zip(jobs[count:], over[count:], strict=True) if not is_over], slurm)
    return list(jobs[:count])


def dismiss(jobs: Sequence[str], slurm: SlurmCommands) -> None:
    """Cancel the follow-up jobs of an ended run, the last one first. It waits for the others' ends."""
    for job in reversed(jobs):
        try:
            slurm.cancel(job)
        except SlurmError as error:  # it will find the result and end by itself
            log.warning("the follow-up job %s could not be cancelled: %s", job, error)


# ------------------------------------------------------------------------------------------------------ taking over


def outcomes(run: RunDir, predecessors: Sequence[str], slurm: SlurmCommands) -> list[JobOutcome]:
    """Return the outcomes of the job that last served the run, and of the ``predecessors`` that have not served it.

    Those may have been preempted before they could check the jobs before them. One that has passed the run on was
    judged by the next job, and after days Slurm tells less of it.
    """
    served, owner = ownership.jobs_of(run)[:1], run.owner()
    earlier = () if owner is None else owner.jobs[:-1]
    others = [job for job in predecessors if job not in earlier]
    return [outcome_of(job, run, slurm) for job in dict.fromkeys([*served, *others])]


def outcome_of(predecessor: str, run: RunDir, slurm: SlurmCommands) -> JobOutcome:
    """Return what became of the job. Ask accounting if the controller has forgotten it, as it does within minutes.

    Queues are longer than that. Wait for a controller that does not answer: only the follow-up job can continue the
    run, and it has its nodes already.
    """

    def look() -> JobRow | None:
        if row := slurm.show_job(predecessor):
            return row
        status = slurm.show_jobs([predecessor])[predecessor]
        if status is None:
            return None
        return JobRow(predecessor, status.state, status.reason, exit_code=status.exit_code)

    row = outages.retry_slurm(look, f"Slurm does not report the state of job {predecessor}")
    if row is None:
        return JobOutcome.UNKNOWN
    if row.exit_code == EXIT_STOPPED:  # its supervisor has left the run to be continued
        return JobOutcome.REQUEUED
    # The first: for example, its node did not see the run folder.
    if row.reason == "JobLaunchFailure" or row.state == "OUT_OF_MEMORY":
        return JobOutcome.NODE_FAILED
    # A signal or lack of memory ended the batch script: Slurm reports FAILED with the exit code 0. A supervisor that
    # fails by itself has another exit code, and writes a result. On a node that did not see the run folder there was no
    # supervisor: since 23.02 Slurm starts the script there all the same.
    if row.state == "FAILED" and (row.exit_code == 0 or not _has_written(row, run)):
        return JobOutcome.NODE_FAILED
    return outcome_of_row(row, restart_count=row.restarts)


def _has_written(row: JobRow, run: RunDir) -> bool:
    """True if the job's log holds output of this start, or its path is unknown."""
    if row.stdout_path is None and not fsio.is_there(run.submission_path):
        return True  # accounting does not tell: the log of a user's own batch script may be anywhere
    others = [] if row.stdout_path is None else [Path(row.stdout_path)]
    return run.has_log_of(row.job_id, row.start_time, *others)


def takes_over(run: RunDir, outcomes: Sequence[JobOutcome]) -> bool:
    """True if the follow-up job is needed, by the run's own files first. ``outcomes`` are from :func:`outcomes`.

    A predecessor that Slurm has forgotten is over all the same, or this job would not have started. A cancellation
    would have left it the time to write a result.
    """
    if run.result() is not None or user_requests.read_intent(run):
        return False
    served, *others = outcomes
    # Its supervisor has left it to be continued, or Slurm took its last job away.
    is_left = run.status().state is RunState.REQUEUED or served in _TAKEN_AWAY
    return is_left and all(outcome in _TAKEN_AWAY for outcome in others)


_TAKEN_AWAY = (
    JobOutcome.PREEMPTED,
    JobOutcome.REQUEUED,
    JobOutcome.TIMEOUT,
    JobOutcome.NODE_FAILED,
    JobOutcome.UNKNOWN,
)


def finish_run(run: RunDir, predecessor: str, token: str | None, slurm: SlurmCommands, job_id: str | None) -> None:
    """Write the result of a run that has ended, if its last job could not, and cancel the other follow-up jobs.

    Leave alone a run that a user has resumed meanwhile: it has another ``token``.
    """
    owner = run.owner()
    if owner is None or owner.token != token:
        return
    dismiss([job for job in ownership.jobs_of(run)[1:] if job != job_id], slurm)
    if run.result() is None:
        state = user_requests.end_state(user_requests.read_intent(run))
        why = f"job {predecessor} was {state}, and could not report it"
        outages.retry_write(lambda: write_ended(run, state, why), run.path)


#: Options that :mod:`toolkit.run.requeue.follow_up` reads back from the job itself, in other terms where need be.
TOLD_BY_JOB = frozenset(
    {
        *("account", "clusters", "cpus-per-task", "job-name", "mem", "mem-per-cpu", "nodes", "ntasks"),
        *("ntasks-per-gpu", "ntasks-per-node", "partition", "reservation", "time"),
        *("constraint", "exclude", "exclusive", "licenses", "nodefile", "nodelist", "oversubscribe", "qos"),
        *("cpus-per-gpu", "gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task", "gres", "mem-per-gpu"),
        "tres-per-task",
    }
)
#: Those about one job and its place in the queue, its output and the environment of its script.
OF_ONE_JOB = frozenset(
    {
        *("array", "begin", "deadline", "dependency", "hold", "kill-on-invalid-dep", "no-requeue", "requeue"),
        *("chdir", "error", "export", "export-file", "get-user-env", "gid", "input", "open-mode", "output", "uid"),
        *("help", "parsable", "quiet", "reboot", "test-only", "usage", "verbose", "version", "wait", "wrap"),
        "time-min",  # each job might get less time than the one before
    }
)
#: Options that may stand on sbatch's command line alone, by the fields of `scontrol show job`.
SHOWN = {"Switches": "switches", "MailUser": "mail-user", "MailType": "mail-type", "Nice": "nice", "Comment": "comment"}


def script_lines(job_id: str, slurm: Slurm | None = None) -> list[str]:
    """Return the ``#SBATCH`` lines of a job that the job itself does not tell otherwise; none if Slurm does not answer.

    Those of a heterogeneous job are left out: each component has its own.
    """
    slurm = slurm or Slurm()
    try:
        options = dict(options_in(slurm.ask(["scontrol", "write", "batch_script", job_id, "-"])))
        # sbatch's command line, which goes before the script.
        options |= dict(options_shown(slurm.ask(["scontrol", "show", "job", job_id])))
    except SlurmError as error:
        log.warning("a follow-up job runs without the options that only the batch script has: %s", error)
        return []
    return [
        f"#SBATCH --{name}" if value is None else f"#SBATCH --{name}={_quoted(value)}"
        for name, value in options.items()
    ]


def _quoted(value: str) -> str:
    """Return a value as sbatch reads it back; it knows no escapes outside quotes."""
    return value if re.fullmatch(r"[^\s\\\"'#]+", value) else '"' + re.sub(r"([\\\"])", r"\\\1", value) + '"'


def options_shown(text: str) -> Iterator[tuple[str, str]]:
    """Yield options and their values from the output of ``scontrol show job``."""
    if "HetJobId=" in text:
        return
    for field, option in SHOWN.items():
        ends = "$" if field == "Comment" else r"(?:\s|$)"  # a free text, which takes its line
        found = re.search(rf"(?:^|\s){field}=(.+?)\s*{ends}", text, re.MULTILINE)
        if found and found[1] not in ("(null)", "0"):
            yield option, found[1]


def options_in(script: str) -> Iterator[tuple[str, str | None]]:
    """Yield the options of a batch script that another job like it gets, with their values, as sbatch reads them.

    That is from lines up to the first that is neither empty nor a comment.
    """
    words: list[str] = []
    for line in script.splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            break
        if line.startswith("#SBATCH"):
            words += _words(line.removeprefix("#SBATCH"))
    if "hetjob" in words or "packjob" in words:
        return
    rest = iter(words)
    for word in rest:
        name, value = _named(word)
        if cluster.FLAGS.get(name) == "value" and value is None:
            value = next(rest, "")
        if name in cluster.FLAGS and name not in TOLD_BY_JOB | OF_ONE_JOB:
            yield name, value


def _words(line: str) -> list[str]:
    """Return the words of a line as sbatch reads them: unlike in a shell, a backslash is an escape in each quote."""
    words, word, quote = list[str](), "", ""
    characters = iter(line + " ")
    for each in characters:
        if each == "\\":
            word += next(characters, "")
        elif each == quote:
            quote = ""
        elif each in "\"'" and not quote:
            quote = each
        elif each == "#" and not word and not quote:
            break
        elif each.isspace() and not quote:
            words += [word] if word else []
            word = ""
        else:
            word += each
    return words


def _named(word: str) -> tuple[str, str | None]:
    """Return the long name of an option and its value, if that is in the same word."""
    if word.startswith("--"):
        name, is_given, value = word[2:].partition("=")
        longer = [flag for flag in cluster.FLAGS if flag.startswith(name)]  # getopt takes a beginning that is clear
        return longer[0] if name not in cluster.FLAGS and len(longer) == 1 else name, value if is_given else None
    return cluster.SHORT.get(word[1:2], word), word[2:] or None
