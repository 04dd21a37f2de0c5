"""What the toolkit asks of Slurm, and the programs that answer it.

Every call is an argv list with a time limit, in the C locale, without the variables by which a user's profile changes
the output (SQUEUE_FORMAT and the like). A program that fails raises `SlurmError` with the end of its stderr. A question
without an answer (accounting off, controller busy) gives ``None``: unknown never means "dead".
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from toolkit.base import outages, signals
from toolkit.base.errors import MaybeQueuedError, SlurmError, SlurmRefusedError, did_you_mean, listing, shortened
from toolkit.base.process_limits import limits
from toolkit.slurm.environment import plain_environment, submit_environment
from toolkit.slurm.jobs import (
    JobGpus,
    JobRow,
    JobStatus,
    base_id,
    job_lines,
    parse_drained,
    parse_gpus,
    parse_jobs,
    parse_statuses,
    row_of,
    rows_by_id,
)
from toolkit.slurm.reachable import DEFAULT_SLURMD_PORT

#: The first version in which a job with ``--requeue=expedite`` that ends with exit code 0 is not held in the queue.
EXPEDITES_SINCE = (25, 11, 3)
#: Seconds for one program: enough for a busy controller, and bearable for a user who waits. Without a readable
#: SLURM_CONF Slurm's programs retry for 60 s before they fail.
TIMEOUT_S = 30.0
PROBE_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Settings:
    """The parts of a cluster's configuration that the toolkit uses. The defaults are Slurm's own."""

    slurmd_port: int = DEFAULT_SLURMD_PORT  #: the port on which every node's slurmd listens
    mpi_default: str = "none"  #: the MPI plugin of an srun that names none
    task_plugins: str = "task/none"  #: tells whether each task is bound to its own CPUs
    preempt_type: str = "preempt/none"
    preempt_mode: str = "OFF"  #: used where neither the partition nor the QOS sets a mode
    kill_wait_s: float = 30.0  #: from SIGTERM to SIGKILL for a job that Slurm ends, including its batch script
    max_array_size: int = 1001  #: an array's indices are below it; 0 where the site has switched arrays off
    expedites: bool = False  #: whether jobs may ask for ``--requeue=expedite``
    signals_all: bool = False  #: a signal for a step reaches also what its tasks have started; else the tasks alone
    cluster: str = ""  #: its name


class SlurmCommands(Protocol):
    """What the rest of the toolkit asks of Slurm. `Slurm` implements it, and for tests `plugins.testing.FakeSlurm`."""

    def available(self) -> bool:
        """True if jobs can be submitted here: sbatch exists and a controller answers within seconds."""

    def show_job(self, job_id: str) -> JobRow | None:
        """Return the job, or ``None`` when the controller no longer knows it."""

    def gpus_of(self, job_id: str) -> JobGpus:
        """Return the GPUs that a running job has on each of its nodes."""

    def show_jobs(self, job_ids: Iterable[str]) -> dict[str, JobStatus | None]:
        """Return the status of every id, ``None`` where it is unknown. Ask once for all ids."""

    def user_jobs(self) -> list[JobStatus]:
        """Return all jobs of this user that the controller knows, ended ones included. One call."""

    def accounted_jobs(self, job_ids: Sequence[str]) -> list[JobStatus]:
        """Return what accounting knows of these jobs; nothing where it is off or down. One call."""

    def job_of_script(self, path: str) -> str | None:
        """Return the id of this user's job, or array, whose batch script is at ``path``. One call."""

    def cancel_waiting(self, job_ids: Sequence[str]) -> None:
        """Cancel those of the jobs and arrays' elements that wait. One call. Forgotten jobs are not an error."""

    def cancel(self, job_id: str, *, signal: str | None = None, step: str | None = None, batch: bool = False) -> None:
        """End a job or one of its steps, or send a signal to all its steps, or with ``batch`` to the batch shell only.

        Ending a job that is over or unknown is not an error. A signal needs a running job with steps: for one that is
        pending or ending, scancel waits for a step until the time limit.
        """

    def find_step(self, job_id: str, name: str) -> str | None:
        """Return the number of the job's running step of this name, or ``None``."""

    def requeue(self, job_id: str, *, if_running: bool = False) -> None:
        """Put the job back into the queue, an array element by its name ``A_T``. One that is there is not an error.

        A plain requeue also revives a job that was canceled and is still completing. With ``if_running`` such a job
        stays canceled without an error: look at the job afterwards.
        """

    def forbid_requeue(self, job_id: str) -> None:
        """Forbid Slurm to requeue the job from now on.

        A job with ``--requeue=expedite`` also goes back into the queue, and is held there, if its batch script ends
        with an exit code other than 0 (``_set_job_requeue_exit_value`` in Slurm's job_mgr.c). A job that may not be
        requeued does not.
        """

    def expedites(self) -> bool:
        """True if the site allows ``--requeue=expedite`` and sbatch knows the option."""

    def exclude_nodes(self, job_id: str, node_list: str) -> None:
        """Keep a pending job off these nodes. Slurm refuses this for a running job: requeue it first."""

    def depend(self, job_id: str, on: Sequence[str]) -> None:
        """Let a pending job wait for the end of these jobs, and of no others. Slurm refuses this for a running job."""

    def drain_reasons(self, node_list: str) -> dict[str, str]:
        """Return the reason, with who gave it, of each of these nodes that takes no new jobs (DRAIN). One call."""

    def topology(self) -> str:
        """Return what `scontrol show topology` prints: switches or blocks, each with its nodes."""

    def release_nodes(self, job_id: str, *, keep: str) -> None:
        """Give back the nodes of a running job except the node list ``keep``, where steps continue.

        A requeued job gets as many nodes as it was submitted with. A site may refuse this (``disable_job_shrink``).
        """

    def sbatch(self, arguments: Sequence[str]) -> str:
        """Submit with these arguments (options, then the script's path) and return the job id.

        Where sbatch does not say it, the queue is asked for the job of that script: no other job may have a script of
        this path. Raises MaybeQueuedError where neither tells whether there is such a job.
        """

    def could_run(self, arguments: Sequence[str]) -> bool:
        """True if a job with these options could ever start. Slurm would hold one that could not for ever, silently."""

    def settings(self) -> Settings:
        """Return how this cluster is set up."""

    def clock(self) -> float:
        """Return the controller's time in seconds since the epoch. A job's times are by its clock."""

    def preemption_cancels(self, job: JobRow, settings: Settings) -> bool:
        """True if a preemption ends this job for good, instead of requeueing or suspending it."""


class Slurm:
    """Slurm itself. ``environ`` replaces ``os.environ``; its PATH also says where the programs are."""

    def __init__(self, environ: Mapping[str, str] | None = None, timeout_s: float = TIMEOUT_S) -> None:
        self._environ = dict(os.environ if environ is None else environ)
        self._timeout_s = timeout_s

    def available(self) -> bool:
        if self._which("sbatch") is None:
            return False
        try:
            answer = self._run(["scontrol", "ping"], timeout_s=min(PROBE_TIMEOUT_S, self._timeout_s))
        except SlurmError:
            return False
        return re.search(r"\bis UP\b", answer) is not None

    def show_job(self, job_id: str) -> JobRow | None:
        try:
            text = self._run(["scontrol", "show", "job", job_id])
        except ProgramRefusedError as error:
            if error.says("Invalid job id"):
                return None
            raise
        rows = parse_jobs(text)
        if not rows:
            raise SlurmError(f"`scontrol show job {job_id}` printed, instead of a job, {text.strip()[:200]!r}")
        return row_of(rows, job_id)

    def gpus_of(self, job_id: str) -> JobGpus:
        return parse_gpus(self._run(["scontrol", "--details", "show", "job", job_id]))

    def show_jobs(self, job_ids: Iterable[str]) -> dict[str, JobStatus | None]:
        wanted = list(dict.fromkeys(job_ids))
        queued: list[JobStatus] = []
        # For several ids squeue would load the jobs of the whole cluster: ask for this user's jobs instead.
        if len(wanted) > 1:
            queued = self.user_jobs()
        elif wanted:
            try:
                queued = parse_statuses(job_lines(self._run([*_SQUEUE, f"--jobs={base_id(wanted[0])}"])))
            except ProgramRefusedError as error:  # squeue fails for a single id that the controller does not know
                if not error.says("Invalid job id"):
                    raise
        # Ask accounting only for the jobs that the controller has forgotten: its database is slow.
        found = rows_by_id(wanted, queued)
        gone = [job_id for job_id in wanted if found[job_id] is None]
        return found | (rows_by_id(gone, self.accounted_jobs(gone)) if gone else {})

    def user_jobs(self) -> list[JobStatus]:
        return parse_statuses(job_lines(self._run([*_SQUEUE, f"--user={os.getuid()}"])))

    def accounted_jobs(self, job_ids: Sequence[str]) -> list[JobStatus]:
        columns = ["--parsable2", "--format=JobID,State,NodeList,ExitCode"]
        ask = ["sacct", "--allocations", "--noheader", *columns, "--jobs=" + ",".join(job_ids)]
        # Accounting tells of other users' jobs, too: a number may have been given again, to one of them.
        ask += [f"--user={os.getuid()}"] if os.getuid() else []
        try:
            return parse_statuses(job_lines(self._run(ask)))
        except SlurmError:
            return []

    def job_of_script(self, path: str) -> str | None:
        # %o is the script with its whole path; a line break or a | in it can only make the line fit nothing.
        ask = ["squeue", "--noheader", "--all", "--states=all", "--format=%F|%o", f"--user={os.getuid()}"]
        lines = job_lines(self._run(ask))
        # Of a heterogeneous job the first component, whose id is the job's, has the lowest one.
        jobs = (job_id for job_id, _, command in (line.partition("|") for line in lines) if command.strip() == path)
        return min(map(str.strip, jobs), key=int, default=None)

    def cancel_waiting(self, job_ids: Sequence[str]) -> None:
        try:
            self._run(["scancel", "--state=PENDING", *job_ids])
        except ProgramRefusedError as error:  # it names those that are gone, and fails, when it has done the others
            if not error.says("Invalid job id"):
                raise

    def cancel(self, job_id: str, *, signal: str | None = None, step: str | None = None, batch: bool = False) -> None:
        options = [f"--signal={signal}"] if signal else []
        options += ["--batch"] if batch else []
        self._run(["scancel", *options, f"{job_id}.{step}" if step is not None else job_id])

    def find_step(self, job_id: str, name: str) -> str | None:
        try:  # squeue would ask the controller for every step of the cluster
            answer = self._run(["scontrol", "show", "step", job_id])
        except ProgramRefusedError as error:
            if error.stderr.strip() and not error.says("Invalid job id"):
                raise
            return None  # scontrol says on stdout that there is no step
        return next((number for number, step_name in _STEP.findall(answer) if step_name == name), None)

    def requeue(self, job_id: str, *, if_running: bool = False) -> None:
        try:
            self._run(["scontrol", "requeue", *["Incomplete"] * if_running, job_id])
        except ProgramRefusedError as error:
            if not error.says("Job is pending execution"):
                raise

    def forbid_requeue(self, job_id: str) -> None:
        self._run(["scontrol", "update", f"JobId={job_id}", "Requeue=0"])

    def expedites(self) -> bool:
        return self.settings().expedites and "--requeue[=expedite]" in self._run(["sbatch", "--help"])

    def exclude_nodes(self, job_id: str, node_list: str) -> None:
        self._run(["scontrol", "update", f"JobId={job_id}", f"ExcNodeList={node_list}"])

    def depend(self, job_id: str, on: Sequence[str]) -> None:
        self._run(["scontrol", "update", f"JobId={job_id}", f"Dependency=afterany:{':'.join(on)}"])

    def drain_reasons(self, node_list: str) -> dict[str, str]:
        return parse_drained(self._run(["scontrol", "--all", "show", "node", node_list]))

    def topology(self) -> str:
        return self._run(["scontrol", "show", "topology"])

    def release_nodes(self, job_id: str, *, keep: str) -> None:
        # Not the plain environment: with a job's environment scontrol leaves scripts in the working directory
        # (update_job.c).
        environ = submit_environment(self._environ)
        self._run(["scontrol", "update", f"JobId={job_id}", f"NodeList={keep}"], environ=environ)

    def sbatch(self, arguments: Sequence[str]) -> str:
        argv = ["sbatch", "--parsable", *arguments]
        try:
            # Not the plain environment: sbatch hands its environment on to the job.
            answer = self._run(argv, environ=submit_environment(self._environ))
        except NoAnswerError as error:
            if not error.is_sent:
                raise
            return self._queued(arguments[-1], str(error))
        # A site's wrapper may print more. --parsable prints the id, followed by ``;CLUSTER`` where a cluster is named.
        found = re.findall(r"(?m)^(?:Submitted batch job )?([0-9]+)(?:;.*| on cluster .*)?$", answer)
        return found[0] if len(found) == 1 else self._queued(arguments[-1], f"sbatch printed {answer.strip()[-500:]!r}")

    def _queued(self, script: str, why: str) -> str:
        """Return the id of the script's job. Raises MaybeQueuedError if the queue shows none for seconds."""
        deadline = time.monotonic() + limits().queued_within_s
        while True:
            try:
                job_id, unknown = self.job_of_script(script), "the queue does not show it yet"
            except SlurmError as error:
                job_id, unknown = None, str(error)
            if job_id is not None:
                return job_id
            if time.monotonic() > deadline:
                raise MaybeQueuedError(
                    f"it is not known whether Slurm accepted the job: {why}\n{unknown}\n"
                    f"Look for it: `squeue --me --format='%i %T %o'` shows it with its script, {script}"
                )
            time.sleep(1.0)

    def could_run(self, arguments: Sequence[str]) -> bool:
        try:
            self._run(["sbatch", "--test-only", *arguments, "--wrap=true"], environ=submit_environment(self._environ))
        except ProgramRefusedError:
            return False
        return True

    def sbatch_flags(self) -> frozenset[str]:
        """Return the long names of all options that sbatch lists. Those of the site's plugins are among them."""
        return frozenset(re.findall(r"--([a-z][a-z0-9-]*)", self._run(["sbatch", "--help"])))

    def settings(self) -> Settings:
        return settings_in(self._run(["scontrol", "show", "config"]))

    def preemption_cancels(self, job: JobRow, settings: Settings) -> bool:
        # Each preemption plugin takes the mode from another place. A pending job may have several partitions or QOS.
        modes: list[str] = []
        if settings.preempt_type == "preempt/partition_prio":
            for name in filter(None, (job.partition or "").split(",")):
                answer = self._run(["scontrol", "--all", "show", "partition", name])
                modes += re.findall(r"\bPreemptMode=(\S+)", answer)
        elif settings.preempt_type == "preempt/qos":
            columns = ["--noheader", "--parsable2", "format=PreemptMode"]
            try:
                modes = self._run(["sacctmgr", "show", "qos", job.qos, *columns]).split() if job.qos else []
            except SlurmError:
                # Accounting cannot be asked, as on many nodes. A follow-up job that is not needed ends by itself, and
                # without one that is needed the run would end.
                return True
        else:
            return False
        modes = [settings.preempt_mode if mode == "cluster" else mode for mode in modes] or [settings.preempt_mode]
        return any("CANCEL" in mode.upper() for mode in modes)

    def has(self, program: str) -> bool:
        """True if this program of Slurm is on PATH."""
        return self._which(program) is not None

    def ask(self, argv: Sequence[str]) -> str:
        """Return what a program of Slurm prints that only asks. Raises SlurmError."""
        return self._run(argv)

    def clock(self) -> float:
        answer = self._run(["sdiag"])
        time_of_answer = re.search(r"^sdiag output at .*\((\d+)\)", answer, re.MULTILINE)
        if time_of_answer is None:
            raise SlurmError(f"sdiag does not say what time it is: {answer[:200]!r}")
        return float(time_of_answer[1])

    # ------------------------------------------------------------------------------------------------ running

    def _which(self, program: str) -> str | None:
        return shutil.which(program, path=self._environ.get("PATH", os.defpath))

    def _run(
        self, argv: Sequence[str], timeout_s: float | None = None, environ: Mapping[str, str] | None = None
    ) -> str:
        path = self._which(argv[0])
        if path is None:
            raise SlurmError(
                f"`{argv[0]}` is not on PATH: this machine has no Slurm client; load its module (`module load slurm`), "
                "go to a login node, or run without Slurm (`--executor local`)"
            )
        if environ is None:
            environ = plain_environment(self._environ)
        return run_program([path, *argv[1:]], timeout_s or self._timeout_s, environ)


def settings_in(text: str) -> Settings:
    """Return the settings that `scontrol show config` prints."""
    # Slurm 24.11 prints (null) where 22.05 prints none.
    found = dict(re.findall(r"^(\w+)[ \t]*=[ \t]*(?!\(null\))(\S+)", text, re.MULTILINE))
    default = Settings()
    return Settings(
        slurmd_port=int(found.get("SlurmdPort", default.slurmd_port)),
        kill_wait_s=float(found.get("KillWait", default.kill_wait_s)),
        mpi_default=found.get("MpiDefault", default.mpi_default),
        task_plugins=found.get("TaskPlugin", default.task_plugins),
        preempt_type=found.get("PreemptType", default.preempt_type),
        preempt_mode=found.get("PreemptMode", default.preempt_mode),
        max_array_size=int(found.get("MaxArraySize", default.max_array_size)),
        # Older versions hold a job that ends well, see EXPEDITES_SINCE.
        expedites="enable_expedited_requeue" in found.get("SlurmctldParameters", "")
        and _version(found.get("SLURM_VERSION", "")) >= EXPEDITES_SINCE,
        # proctrack/cgroup spares all but the tasks, except for SIGKILL; proctrack/pgid knows their groups alone.
        signals_all=found.get("ProctrackType") == "proctrack/linuxproc",
        cluster=found.get("ClusterName", default.cluster),
    )


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])


#: Number and name of each step in the output of `scontrol show step`; names of the toolkit's steps have no spaces.
_STEP = re.compile(r"^StepId=\S+\.(\w+) .*?^ .*?\bName=(\S+)", re.MULTILINE | re.DOTALL)
#: The columns of `parse_statuses`. ``%S`` is the start, of a pending job the one that the scheduler expects; ``%o`` the
#: batch script with its whole path. ``--all`` is for jobs in hidden partitions.
_SQUEUE = ("squeue", "--noheader", "--all", "--array", "--states=all", "--format=%i|%T|%N|%S|%r|%o")


def settings_of(slurm: SlurmCommands) -> Settings:
    """Return the site's settings; Slurm's defaults where it does not answer at once."""
    return outages.retry_slurm(slurm.settings, "Slurm does not report its settings", wait_s=0.0) or Settings()


class _ProgramError(SlurmError):
    """A program of Slurm ended with an exit code other than 0."""

    def __init__(self, argv: Sequence[str], code: int, stderr: str) -> None:
        self.stderr = stderr
        lines = shortened("\n  ".join(stderr.strip().splitlines()[-5:]), 2000) or "(nothing on stderr)"
        super().__init__(f"`{_shown(argv)}` failed with exit code {code}:\n  {lines}{advice_on(stderr)}")

    def says(self, words: str) -> bool:
        return words.lower() in self.stderr.lower()


class ProgramRefusedError(_ProgramError, SlurmRefusedError):
    """The controller answered and refused."""


class NoAnswerError(SlurmError):
    """The controller did not answer. What it was asked for may have happened, if ``is_sent``."""

    is_sent = True


class _FailedWithoutAnswerError(_ProgramError, NoAnswerError):
    """The controller restarts, is overloaded, or cannot be reached over the network."""

    @property
    def is_sent(self) -> bool:  # type: ignore[override]
        return not any(self.says(words) for words in _NOT_SENT)


#: What Slurm's programs print when no daemon could be reached (slurm_errno.c, 22.05 to 25.11).
_NO_ANSWER = (
    "Unable to contact slurm controller",
    "Unable to contact slurm database",
    "Socket timed out",
    "Zero Bytes were transmitted",
    "Communication connection failure",
    "Connection refused",
    "Connection reset",
    "slurm_receive_msg",
    "in standby mode",
    "Protocol authentication error",
    "Rate limit exceeded",
)
_PARTITION = "invalid partition"
#: Those of them after which nothing was sent.
_NOT_SENT = ("Unable to contact slurm controller", "Connection refused")
#: Advice for the most frequent failures, by what Slurm prints.
_ADVICE = (
    ("Unable to contact slurm controller", "the controller is down or unreachable: `scontrol ping`, or ask the site"),
    ("Could not establish a configuration source", "set SLURM_CONF to the cluster's slurm.conf"),
    ("Invalid account", "name one of `sacctmgr show associations user=$USER` as cluster.account in the site defaults"),
    (_PARTITION, "name one of `sinfo --summarize` as cluster.partition"),
    ("Requested node configuration is not available", "ask for less: `sinfo -o '%P %D %c %m %G'` shows what there is"),
    ("Invalid generic resource", "`sinfo -o '%P %G'` shows what there is; shard and mps do not go with gpu in one job"),
    ("Requested topology", "cluster.segment must divide nodes with spares, and fit a block: `scontrol show topology`"),
    ("option '--segment", "leave cluster.segment out, which is new in Slurm 24.05: ranks are placed by blocks anyway"),
    ("Job violates accounting/QOS policy", "the account's limits are reached: `sacctmgr show qos`, or ask for less"),
    ("presently disabled", "the job was submitted with --no-requeue, or the site forbids requeueing (JobRequeue=0)"),
)  # fmt: skip


def advice_on(stderr: str) -> str:
    """Return what to do about a failure of Slurm's, as a line to append; empty where it is not known."""
    found = next((advice for words, advice in _ADVICE if words.lower() in stderr.lower()), None)
    if _PARTITION in stderr.lower():
        wrong = re.search(r"specified: (\S+)", stderr)
        with suppress(SlurmError):
            names = run_program(["sinfo", "--noheader", "--format=%R"], 10.0, os.environ).split()
            found = f"{did_you_mean(wrong[1], names) if wrong else ''}cluster.partition is one of {listing(names)}"
    return f"\nWhat to do: {found}" if found else ""


def _shown(argv: Sequence[str]) -> str:
    return " ".join([argv[0].rpartition("/")[2], *argv[1:]])


def run_program(argv: Sequence[str], timeout_s: float, environ: Mapping[str, str]) -> str:
    """Return the program's stdout. It gets no stdin: a program that asks a question would wait for ever.

    A signal that Slurm sends to all processes of a job is not for it: a requeue must not fail because of that.
    """
    try:
        with signals.kept_from_children(signals.END_SIGNALS):
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                env=environ,
                start_new_session=True,
            )
    except OSError as error:
        raise SlurmError(f"`{_shown(argv)}` could not be started: {error}") from error
    with process:
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            process.kill()
            raise NoAnswerError(
                f"`{_shown(argv)}` did not answer within {timeout_s:g} s: the controller is busy or unreachable, "
                "SLURM_CONF cannot be read, or the job has no running step to signal; try `scontrol ping` and `squeue`"
            ) from error
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        # Death by a signal is no answer either.
        is_silent = process.returncode < 0 or any(words in stderr for words in _NO_ANSWER)
        raise (_FailedWithoutAnswerError if is_silent else ProgramRefusedError)(argv, process.returncode, stderr)
    return stdout
