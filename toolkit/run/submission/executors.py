"""Starts a run through submitit: on Slurm, on this machine or in this process.

submitit's pickle holds two strings, the run folder and where it runs, and nothing else. So an upgrade of a library
between submission and start cannot make it unreadable.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.base import fsio, logs, staged, terminal
from toolkit.base.errors import (
    MaybeQueuedError,
    RequestError,
    RunLockedError,
    SlurmError,
    SlurmRefusedError,
    SubmissionRefusedError,
)
from toolkit.config import ClusterConfig, JobConfig
from toolkit.config.cluster import gpus_in
from toolkit.config.validation import may_lose_nodes
from toolkit.files import rundir
from toolkit.files.run_files import OwnerRecord, RunProgress, RunState, RunStatus
from toolkit.files.rundir import RunDir
from toolkit.nodes.start.children import open_log
from toolkit.run.prepare import snapshot
from toolkit.run.records import ownership
from toolkit.run.requeue import follow_up
from toolkit.run.requeue.requeue import forbid_expedited_requeue
from toolkit.run.submission.handle import Run
from toolkit.slurm.commands import Slurm
from toolkit.slurm.environment import submit_environment
from toolkit.slurm.jobs import JobRow
from toolkit.slurm.states import NEVER, describe_reason

log = logs.get(__name__)

#: sbatch waits in a busy controller's queue; what is killed then may have submitted.
_SBATCH_TIMEOUT_S = 300.0
EXECUTORS = ("auto", "slurm", "local", "debug")
#: submitit's local executor kills at its time limit and leaves orphans, so the limit is set out of reach.
NO_LIMIT_MIN = 60 * 24 * 365


def choose_executor(name: str) -> str:
    """Resolve ``auto`` and return the executor. Raises RequestError for an unknown name, or where Slurm is away."""
    if name not in EXECUTORS:
        raise RequestError(f"executor: unknown value {name!r}; valid: {', '.join(EXECUTORS)}")
    if name != "auto":
        return name
    if Slurm().available():
        return "slurm"
    if shutil.which("sbatch"):  # a login node, perhaps, which is not to train
        raise RequestError(
            "sbatch is here but Slurm's controller does not answer (`scontrol ping`): try again in a while, or say "
            "where to run: --executor slurm, or --executor local for this machine"
        )
    return "local"


def send(run: RunDir, config: JobConfig, executor: str, owner: OwnerRecord, *, began_s: float | None = None) -> Run:
    """Start the run's job and record its id; return the handle. Raises SlurmError, or OSError for a full disk.

    ``began_s`` is when the submission began, by ``time.monotonic()``.
    """
    note_queued(run)
    fsio.set_private_umask()  # submitit's files hold logs too
    try:
        start = {"slurm": _send_to_slurm, "local": _send_to_local, "debug": _send_to_debug}[executor]
        job_id = start(run, config, owner.token)
    finally:
        fsio.restore_umask()
        os.environ.pop(fsio.UMASK_VARIABLE, None)  # another thread may submit, too
    sent = Run(run, executor, job_id)
    # A job whose id cannot be written down is cancelled: no later command would find it.
    try:
        # sbatch has answered so late that another submission took this one for dead, and has the run by now.
        present = run.owner() if executor == "slurm" else None
        if present is not None and present.token != owner.token:
            raise RunLockedError(f"run {run.id} has been resumed elsewhere in the meantime: `toolkit status {run.id}`")
        took_s = None if began_s is None else round(time.monotonic() - began_s, 3)
        ownership.note_jobs(run, owner, job_id, took_s=took_s)
    except (OSError, RequestError):
        if executor == "slurm":
            _cancel([job_id])
            raise
        log.warning("%s could not be written", run.submission_path, exc_info=True)
    if executor == "slurm":
        _send_follow_up(run, config, owner, job_id, took_s)
    return sent


def note_queued(run: RunDir) -> None:
    """Write the status of a run that is being submitted."""
    status = RunStatus(state=RunState.QUEUED, run=f"{run.name}/{run.id}", updated=time.time(), progress=RunProgress())
    interrupted = run.interrupted_status()
    run.write_status(status if interrupted is None else status.replace(interrupted=interrupted))


def _send_to_slurm(run: RunDir, config: JobConfig, token: str) -> str:
    import submitit

    from toolkit.run.supervise.entry import supervise

    submitted: list[str] = []

    class Executor(submitit.SlurmExecutor):
        """Writes the options of all components into the script, and submits it as every other job is."""

        def _submit_command(self, command: str) -> submitit.SlurmJob[Any]:
            script = run.submitit / f"submission-{token}.sh"
            text = with_components(self._make_submission_file_text(command, token), config, run)
            fsio.write_atomic(script, text)
            # After this submitit writes files, and may fail to.
            submitted.append(Slurm(timeout_s=_SBATCH_TIMEOUT_S).sbatch([str(script)]))
            return submitit.SlurmJob(self.folder, submitted[0], [0])

    with _fewer_words():
        try:
            executor = Executor(run.submitit, python=python_exec_line())
            parameters = slurm_parameters(config, run, token)
            # Not in slurm_parameters: a follow-up job is never requeued.
            flags = parameters["additional_parameters"]
            if _may_expedite(config):
                flags["requeue"] = "expedite"
            # Wait for the current jobs of the runs that come first. Whether that is enough, the run finds out itself.
            if (waits_for := run.dependencies()) is not None:
                from toolkit.plugins.sweep import awaited

                if jobs := awaited.prerequisites(waits_for, Slurm().show_jobs).jobs:
                    theirs = f"afterany:{':'.join(jobs)}"
                    flags["dependency"] = ",".join(filter(None, [flags.get("dependency"), theirs]))
            executor.update_parameters(**parameters)
            return str(executor.submit(supervise, str(run.path), "slurm").job_id)
        except MaybeQueuedError as error:
            raise MaybeQueuedError(
                f"{error}\nIf it is there, end it with `scancel`. The run is kept: `toolkit resume {run.id}` submits it"
            ) from error
        except SlurmError as error:
            kind = SubmissionRefusedError if isinstance(error, SlurmRefusedError) else SlurmError
            raise kind(f"nothing was submitted: {error}") from error
        except OSError:
            _cancel(submitted)
            raise


def _may_expedite(config: JobConfig) -> bool:
    """True if Slurm can restart the job at once after a requeue. A job that has lost a node comes before all others."""
    flags = {str(key).replace("_", "-") for key in config.cluster.extra}
    if flags & {"requeue", "no-requeue"}:
        return False
    try:
        return Slurm().expedites()
    except SlurmError as error:
        log.debug("Slurm does not report whether it expedites requeues: %s", error)
        return False


def _cancel(jobs: Sequence[str]) -> None:
    """Cancel jobs that could not be recorded as the run's."""
    for job_id in jobs:
        with suppress(SlurmError):
            Slurm().cancel(job_id)


def warn_if_held(row: JobRow | None, cancel: str) -> None:
    """Warn of a job that is queued and asks for more than it can have. The command ``cancel`` takes it back."""
    if row is not None and row.reason in NEVER:
        log.warning(
            "job %s is queued and may never start: %s; `%s` cancels it; then ask for less",
            *(row.job_id, describe_reason(row.reason), cancel),
        )


def _send_follow_up(run: RunDir, config: JobConfig, owner: OwnerRecord, job_id: str, took_s: float | None) -> None:
    """Submit a follow-up job where Slurm may end the job for good. It may do so before the job could submit one."""
    slurm = Slurm()
    try:
        row = slurm.show_job(job_id)
        warn_if_held(row, f"toolkit cancel {run.id}")
        if row is None or not follow_up.are_needed(row, slurm.settings(), slurm):
            return
    except SlurmError as error:
        log.warning("whether a preemption cancels job %s is not known before it starts: %s", job_id, error)
        return
    try:
        follower = follow_up.submit(run, slurm, follow_up_script(run, config, owner.token, job_id), [job_id])
    except (SlurmError, OSError) as error:  # the job tries again when it starts
        log.warning("no follow-up job could be submitted: %s", error)
        return
    forbid_expedited_requeue(slurm, job_id)  # the follow-up job waits for an end that a queued job never has
    try:
        # Recorded first: the job looks for it there once this is decided.
        ownership.note_jobs(run, owner, job_id, follower, took_s=took_s)
        if ownership.claim_follow_up(run, owner.token):
            return
        ownership.note_jobs(run, owner, job_id, took_s=took_s)
    except OSError as error:  # an unrecorded job could not be found; the first job submits another when it starts
        log.warning("the follow-up job %s is not used: %s", follower, error)
    # The first job has started meanwhile, and submits its own.
    follow_up.dismiss([follower], slurm)


def _send_to_local(run: RunDir, config: JobConfig, token: str) -> str:
    import submitit

    from toolkit.run.supervise.entry import supervise

    # As on Slurm, imports come from the run's copy of the sources, and cluster.setup is run first.
    environ = {**submit_environment(os.environ), **snapshot.job_environment(run, os.environ, token)}
    python = None
    if config.cluster.setup:
        script = run.submitit / f"submission-{token}.sh"
        fsio.write_atomic(script, "\n".join([*_setup(config.cluster, run, token), f'{python_exec_line()} "$@"', ""]))
        python = f"bash {shlex.quote(str(script))}"
    log_path = run.submitit / "controller.log"
    with _only_these(environ), _ignoring_the_terminal(), _fewer_words(), _output_to(log_path):
        executor = submitit.LocalExecutor(run.submitit, python=python)
        executor.update_parameters(timeout_min=NO_LIMIT_MIN, gpus_per_node=config.cluster.gpus_per_node)
        return str(executor.submit(supervise, str(run.path), "local").job_id)


def _send_to_debug(run: RunDir, config: JobConfig, token: str) -> str:
    import submitit

    from toolkit.run.rank.main import run_rank

    if config.cluster.setup:
        log.warning("cluster.setup is not run: the one rank is in this process; give the command after these lines")
    with _only_these({**os.environ, rundir.RUN_DIR_VARIABLE: str(run.path)}), _fewer_words(), terminal.unguarded():
        job = submitit.DebugExecutor(run.submitit).submit(run_rank, str(run.config), [])
        job.result()
        return str(job.job_id)


@contextmanager
def _only_these(environ: Mapping[str, str]) -> Iterator[None]:
    """Make ``os.environ`` equal to ``environ``: submitit starts its programs with it."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _ignoring_the_terminal() -> Iterator[None]:
    """Start children that ignore Ctrl-C and a closing terminal, which the waiting caller handles.

    submitit's controller would kill the supervisor one second after Ctrl-C, with everything unsaved.
    """
    if threading.current_thread() is not threading.main_thread():  # handlers can be set only there
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _output_to(path: Path) -> Iterator[None]:
    """Start children that write to ``path`` and read nothing.

    A child that kept the caller's pipe open until the run's end would make ``$(toolkit submit ...)`` wait for it.
    """
    terminal.open_standard_files()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    # The descriptors themselves are replaced, since children inherit those and not sys.stdout.
    saved = {number: os.dup(number) for number in (0, 1, 2)}
    try:
        with Path(os.devnull).open("rb") as nothing, open_log(path) as file:
            for source, number in ((nothing, 0), (file, 1), (file, 2)):
                os.dup2(source.fileno(), number)
        yield
    finally:
        for number, copy in saved.items():
            os.dup2(copy, number)
            os.close(copy)


@contextmanager
def _fewer_words() -> Iterator[None]:
    """Silence submitit's info lines, which are not for our users. It pickles by reference what it can import."""
    logger = logging.getLogger("submitit")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def sbatch_script(config: JobConfig, run: RunDir) -> str:
    """Return the text that submitit hands to sbatch, made by submitit itself."""
    command = f"{python_exec_line()} -u -m submitit.core._submit {shlex.quote(str(run.submitit))}"
    return with_components(_text_of(run, command, slurm_parameters(config, run, "TOKEN")), config, run)


def with_components(script: str, config: JobConfig, run: RunDir) -> str:
    """Return a batch script with the options of the job's other components behind those of the first."""
    lines, blocks = script.split("\n"), list[str]()
    for part in config.cluster.component_requests[1:]:
        options = _text_of(run, "", slurm_parameters(config, run, "", part)).split("\n")
        blocks += [
            "#SBATCH hetjob",
            *(line for line in options if line.startswith("#SBATCH") and not _WHOLE.match(line)),
        ]
    first = max(number for number, line in enumerate(lines) if line.startswith("#SBATCH")) + 1
    return "\n".join([*lines[:first], *blocks, *lines[first:]])


#: Options that sbatch takes from the first component alone.
_WHOLE = re.compile(r"#SBATCH --(?:job-name|output|error|open-mode|signal|wckey|dependency|requeue|no-requeue)\b")


def _text_of(run: RunDir, command: str, values: Mapping[str, Any]) -> str:
    from submitit.slurm.slurm import _make_sbatch_string

    return str(_make_sbatch_string(command=command, folder=run.submitit, **values))


def follow_up_script(run: RunDir, config: JobConfig, token: str, job_id: str) -> str:
    """Return the script of a follow-up job. It lacks requests about one job's place in the queue."""
    cluster = config.cluster
    extra = {key: value for key, value in cluster.extra.items() if not follow_up.is_for_one_job(key)}
    inherited = replace(config, cluster=replace(cluster, extra=extra))
    values = slurm_parameters(inherited, run, token)
    for name, value in follow_up.environment(run, [job_id]).items():
        values["setup"].append(f"export {name}={shlex.quote(value)}")
    return with_components(_text_of(run, follow_up.command(run), values), inherited, run)


def python_exec_line() -> str:
    """Return the Python command with ``exec``. A bash in between would die at the first SIGTERM, and all with it."""
    return f"exec {shlex.quote(str(staged.origin(sys.executable)))}"


def slurm_parameters(
    config: JobConfig, run: RunDir, token: str, component: ClusterConfig | None = None
) -> dict[str, Any]:
    """Return submitit's parameters for this job, or one of its components: every key of ``cluster`` in Slurm's terms.

    GPUs are asked for at job level: a request per task would hide the peers' devices from NCCL.
    """
    parts = config.cluster.component_requests
    cluster = component or parts[0]
    values: dict[str, Any] = {
        "job_name": config.name,
        "nodes": cluster.nodes + cluster.spare_nodes,
        "ntasks_per_node": cluster.tasks_per_node,
        "cpus_per_task": cluster.cpus_per_task,
        "gpus_per_node": _gpus(cluster),
        "time": cluster.time_min,
        "exclusive": cluster.exclusive or None,
        "wckey": None,  # submitit's own default, "submitit", is refused where wckeys are enforced
        "use_srun": False,  # the supervisor runs on the batch host, outside any step, and starts srun itself
        "stderr_to_stdout": True,
        "setup": _setup(cluster, run, token),
    }
    others: dict[str, Any] = {
        "signal": f"B:USR2@{cluster.save_before_limit_s}"
    }  # to the supervisor; ranks would die of it
    # A component of one node goes without: if it is lost, Slurm would requeue that component alone, and hold the job.
    if may_lose_nodes(config, sum(part.nodes + part.spare_nodes for part in parts)) and values["nodes"] > 1:
        others["no-kill"] = True
    if cluster.mem_gb is not None:
        others["mem"] = f"{round(cluster.mem_gb * 1024)}M"
    if cluster.segment is not None:
        others["segment"] = cluster.segment
    for key, value in cluster.extra.items():
        if value is not False:
            others[str(key).replace("_", "-")] = _text(value)
    values["additional_parameters"] = others
    for name in _CHOOSING_NODES:
        values[name] = _text(getattr(cluster, name))
    if "nodes" in others:  # a range of them
        del values["nodes"]
    return {name: value for name, value in values.items() if value is not None or name == "wckey"}


def _setup(cluster: ClusterConfig, run: RunDir, token: str) -> list[str]:
    """Return the lines that come before the supervisor: ``cluster.setup``, and what the supervisor needs."""
    quoted = {name: shlex.quote(value) for name, value in snapshot.job_environment(run, {}, token).items()}
    quoted["PYTHONPATH"] += '"${PYTHONPATH:+:$PYTHONPATH}"'
    # The setup may set another umask for what the ranks write; sbatch gives the shell ours, which is private.
    umask, quoted[fsio.UMASK_VARIABLE] = quoted[fsio.UMASK_VARIABLE], "$(umask)"
    exports = [f"export {name}={value}" for name, value in quoted.items()]
    # Ours come last: `module load` may set PYTHONPATH.
    return [follow_up.IGNORE_SIGNALS, f"umask {umask}", *cluster.setup, *exports, "umask 077"]


#: Keys of ``cluster`` that are named as the flags which choose the nodes.
_CHOOSING_NODES = ("partition", "account", "qos", "constraint", "exclude")
#: Flags of sbatch without a config key of their own that decide whether and where srun gets nodes.
_PLACING = ("nodelist", "reservation", "wckey", "licenses", "gres")


def srun_options(config: JobConfig) -> list[str]:
    """Return the node choice of ``cluster`` as options of an srun that holds nodes for seconds, from the login node."""
    cluster = config.cluster
    values: dict[str, Any] = {"job-name": "doctor", "time": 5, "gpus-per-node": _gpus(cluster)}
    values |= {name: getattr(cluster, name) for name in _CHOOSING_NODES}
    values |= {name: cluster.extra.get(name) for name in _PLACING}
    options = [f"--{name}={value}" for name, value in values.items() if value is not None]
    if cluster.exclusive:
        options.append("--exclusive")
    return options


def _text(value: Any) -> Any:
    """Escape backslashes. submitit quotes for a shell, but sbatch reads one as an escape also in single quotes."""
    return value.replace("\\", "\\\\") if isinstance(value, str) else value


def _gpus(cluster: ClusterConfig) -> str | int | None:
    if cluster.gpus_per_node == 0 or gpus_in(cluster) is not None:  # else sbatch would get both
        return None
    return f"{cluster.gpu_type}:{cluster.gpus_per_node}" if cluster.gpu_type else cluster.gpus_per_node
