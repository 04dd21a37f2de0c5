"""The only module that runs Slurm's programs and parses their output.

Every call is an argv list with a time limit, in the C locale, without the variables by which a user's profile changes
the output (SQUEUE_FORMAT and the like). A program that fails raises `SlurmError` with the end of its stderr. A question
without an answer (accounting off, controller busy) gives ``None``: unknown never means "dead".
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from toolkit.errors import SlurmError, SlurmRefusedError
from toolkit.slurm import states
from toolkit.slurm.reachable import DEFAULT_SLURMD_PORT

#: Seconds for one program: enough for a busy controller, and bearable for a user who waits. Without a readable
#: SLURM_CONF Slurm's programs retry for 60 s before they fail.
TIMEOUT_S = 30.0
PROBE_TIMEOUT_S = 5.0
#: The first version in which a job with ``--requeue=expedite`` that ends with exit code 0 is not held in the queue.
EXPEDITES_SINCE = (25, 11, 3)


@dataclass(frozen=True)
class JobRow:
    """One job as ``scontrol show job`` prints it. Times are seconds since the epoch, ``None`` where Slurm has none."""

    job_id: str
    state: str  #: long form, see `toolkit.slurm.states`
    reason: str | None = None
    name: str | None = None
    array_job_id: str | None = None
    array_task_id: str | None = None
    restarts: int = 0
    can_requeue: bool = True
    is_expedited: bool = False  #: see `SlurmCommands.forbid_requeue`
    submit_time: float | None = None
    start_time: float | None = None  #: while pending: Slurm's estimate
    end_time: float | None = None  #: while running: when the time limit or the grace time of a preemption ends it
    preempt_time: float | None = None
    time_limit_s: float | None = None  #: None: unlimited, or the partition's limit
    partition: str | None = None
    qos: str | None = None
    node_list: str = ""
    excluded: str = ""  #: node list, as asked for
    options: tuple[str, ...] = ()  #: sbatch options asked for, except sizes, which the job's environment holds
    batch_host: str | None = None
    exit_code: int | None = None  #: 0 until the job ends
    exit_signal: int | None = None
    command: str | None = None
    work_dir: str | None = None
    stdout_path: str | None = None

    @property
    def is_over(self) -> bool:
        return states.is_over(self.state)

    @property
    def requeue_id(self) -> str:
        """Return the id to requeue: ``ARRAY_TASK`` for an array element. The bare id would requeue the whole array."""
        is_element = self.array_job_id is not None and (self.array_task_id or "").isdigit()
        return f"{self.array_job_id}_{self.array_task_id}" if is_element else self.job_id


@dataclass(frozen=True)
class JobStatus:
    """The fields of a job that both squeue and sacct report."""

    job_id: str
    state: str
    reason: str | None = None
    node_list: str = ""

    @property
    def is_over(self) -> bool:
        return states.is_over(self.state)


@dataclass(frozen=True)
class Settings:
    """The parts of a cluster's configuration that the toolkit uses. The defaults are Slurm's own."""

    slurmd_port: int = DEFAULT_SLURMD_PORT  #: the port on which every node's slurmd listens
    mpi_default: str = "none"  #: the MPI plugin of an srun that names none
    task_plugins: str = "task/none"  #: tells whether each task is bound to its own CPUs
    preempt_type: str = "preempt/none"
    preempt_mode: str = "OFF"  #: used where neither the partition nor the QOS sets a mode
    kill_wait_s: float = 30.0  #: from SIGTERM to SIGKILL for a job that Slurm ends, including its batch script
    expedites: bool = False  #: whether jobs may ask for ``--requeue=expedite``


class SlurmCommands(Protocol):
    """What the rest of the toolkit asks of Slurm. `Slurm` and `toolkit.slurm.fake.FakeSlurm` implement it."""

    def available(self) -> bool:
        """True if jobs can be submitted here: sbatch exists and a controller answers within seconds."""
        ...

    def show_job(self, job_id: str) -> JobRow | None:
        """Return the job, or ``None`` when the controller no longer knows it."""
        ...

    def show_jobs(self, job_ids: Iterable[str]) -> dict[str, JobStatus | None]:
        """Return the status of every id, ``None`` where it is unknown. Ask once for all ids."""
        ...

    def cancel(self, job_id: str, *, signal: str | None = None, step: str | None = None, batch: bool = False) -> None:
        """End a job or one of its steps, or send a signal.

        The signal goes to all steps of the job, or with ``batch`` to the batch shell only. Ending a job that is over or
        unknown is no error. A signal needs a running job with steps: for a job that is pending or ending, scancel waits
        for a step until the time limit.
        """
        ...

    def find_step(self, job_id: str, name: str) -> str | None:
        """Return the number of the job's running step of this name, or ``None``."""
        ...

    def requeue(self, job_id: str, *, if_running: bool = False) -> None:
        """Put the job back into the queue. Name array elements ``A_T``.

        It is no error if Slurm has requeued the job already. A plain requeue also revives a job that was canceled and
        is still completing. With ``if_running`` such a job stays canceled, which is no error either: look at the job
        afterwards.
        """
        ...

    def forbid_requeue(self, job_id: str) -> None:
        """Forbid Slurm to requeue the job from now on.

        A job with ``--requeue=expedite`` also goes back into the queue, and is held there, if its batch script ends
        with an exit code other than 0 (``_set_job_requeue_exit_value`` in Slurm's job_mgr.c). A job that may not be
        requeued does not.
        """
        ...

    def expedites(self) -> bool:
        """True if the site allows ``--requeue=expedite`` and sbatch knows the option."""
        ...

    def exclude_nodes(self, job_id: str, node_list: str) -> None:
        """Keep a pending job off these nodes. Slurm refuses this for a running job: requeue it first."""
        ...

    def drained(self, node_list: str) -> dict[str, str]:
        """Return the reason for each of these nodes that takes no new jobs (DRAIN), with who gave it.

        Asks once for all nodes.
        """
        ...

    def release_nodes(self, job_id: str, *, keep: str) -> None:
        """Give back the nodes of a running job except the node list ``keep``, where steps go on.

        A requeued job gets as many nodes as it was submitted with. A site may refuse this (``disable_job_shrink``).
        """
        ...

    def sbatch(self, arguments: Sequence[str]) -> str:
        """Submit with these arguments (options, then the script's path) and return the job id."""
        ...

    def could_run(self, arguments: Sequence[str]) -> bool:
        """True if a job with these options could ever start. Slurm would hold one that could not for ever, silently."""
        ...

    def settings(self) -> Settings:
        """Return how this cluster is set up."""
        ...

    def clock(self) -> float:
        """Return the controller's time, by which a job's times are measured, in seconds since the epoch."""
        ...

    def preemption_cancels(self, job: JobRow, settings: Settings) -> bool:
        """True if a preemption ends this job for good, instead of requeueing or suspending it."""
        ...


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
        except _ProgramFailed as error:
            if error.says("Invalid job id"):
                return None
            raise
        # A whole array has several rows: return the row asked for, else the first.
        rows = parse_jobs(text)
        return next((row for row in rows if job_id in (row.job_id, row.requeue_id)), rows[0] if rows else None)

    def show_jobs(self, job_ids: Iterable[str]) -> dict[str, JobStatus | None]:
        wanted = list(dict.fromkeys(job_ids))
        # squeue first; accounting only for the jobs that the controller has forgotten.
        found = _match(wanted, self._queued(wanted) if wanted else [])
        gone = [job_id for job_id in wanted if found[job_id] is None]
        return found | (_match(gone, self._accounted(gone)) if gone else {})

    def cancel(self, job_id: str, *, signal: str | None = None, step: str | None = None, batch: bool = False) -> None:
        options = [f"--signal={signal}"] if signal else []
        options += ["--batch"] if batch else []
        self._run(["scancel", *options, f"{job_id}.{step}" if step is not None else job_id])

    def find_step(self, job_id: str, name: str) -> str | None:
        try:  # of squeue the controller would be asked for every step of the cluster
            answer = self._run(["scontrol", "show", "step", job_id])
        except _ProgramFailed as error:
            if error.stderr.strip() and not error.says("Invalid job id"):
                raise
            return None  # that there is no step it says on stdout
        return next((number for number, step_name in _STEP.findall(answer) if step_name == name), None)

    def requeue(self, job_id: str, *, if_running: bool = False) -> None:
        try:
            self._run(["scontrol", "requeue", *["Incomplete"] * if_running, job_id])
        except _ProgramFailed as error:
            if not error.says("Job is pending execution"):
                raise

    def forbid_requeue(self, job_id: str) -> None:
        self._run(["scontrol", "update", f"JobId={job_id}", "Requeue=0"])

    def expedites(self) -> bool:
        return self.settings().expedites and "--requeue[=expedite]" in self._run(["sbatch", "--help"])

    def exclude_nodes(self, job_id: str, node_list: str) -> None:
        self._run(["scontrol", "update", f"JobId={job_id}", f"ExcNodeList={node_list}"])

    def drained(self, node_list: str) -> dict[str, str]:
        # --all also lists nodes whose partition is hidden.
        return parse_drained(self._run(["scontrol", "--all", "show", "node", node_list]))

    def release_nodes(self, job_id: str, *, keep: str) -> None:
        # Not the plain environment: with a job's environment scontrol leaves scripts in the working directory
        # (update_job.c).
        environ = submit_environment(self._environ)
        self._run(["scontrol", "update", f"JobId={job_id}", f"NodeList={keep}"], environ=environ)

    def sbatch(self, arguments: Sequence[str]) -> str:
        # Not the plain environment: sbatch hands its environment on to the job.
        answer = self._run(["sbatch", "--parsable", *arguments], environ=submit_environment(self._environ))
        # --parsable prints the id, followed by ``;CLUSTER`` where a cluster is named.
        lines = answer.split()
        if not lines or not re.fullmatch(r"[0-9]+(;.*)?", lines[-1]):
            raise SlurmError(f"sbatch printed no job id but {answer.strip()!r}; look for the job with `squeue --me`")
        return lines[-1].partition(";")[0]

    def could_run(self, arguments: Sequence[str]) -> bool:
        try:
            self._run(["sbatch", "--test-only", *arguments, "--wrap=true"], environ=submit_environment(self._environ))
        except _ProgramFailed:
            return False
        return True

    def sbatch_flags(self) -> frozenset[str]:
        """Return the long names of all options that sbatch lists, including those of the site's plugins."""
        return frozenset(re.findall(r"--([a-z][a-z0-9-]*)", self._run(["sbatch", "--help"])))

    def settings(self) -> Settings:
        text = self._run(["scontrol", "show", "config"])
        names = "SlurmdPort|KillWait|MpiDefault|TaskPlugin|PreemptType|PreemptMode|SlurmctldParameters|SLURM_VERSION"
        found = dict(re.findall(rf"^({names})\s*=\s*(\S+)", text, re.MULTILINE))
        default = Settings()
        return Settings(
            slurmd_port=int(found.get("SlurmdPort", default.slurmd_port)),
            kill_wait_s=float(found.get("KillWait", default.kill_wait_s)),
            mpi_default=found.get("MpiDefault", default.mpi_default),
            task_plugins=found.get("TaskPlugin", default.task_plugins),
            preempt_type=found.get("PreemptType", default.preempt_type),
            preempt_mode=found.get("PreemptMode", default.preempt_mode),
            # Older versions hold a job that ends well, see EXPEDITES_SINCE.
            expedites="enable_expedited_requeue" in found.get("SlurmctldParameters", "")
            and _version(found.get("SLURM_VERSION", "")) >= EXPEDITES_SINCE,
        )

    def preemption_cancels(self, job: JobRow, settings: Settings) -> bool:
        # Each preemption plugin takes the mode from another place.
        asked = {"preempt/partition_prio": self._mode_of_partition, "preempt/qos": self._mode_of_qos}
        ask = asked.get(settings.preempt_type)
        return ask is not None and "CANCEL" in (ask(job) or settings.preempt_mode).upper()

    def _mode_of_partition(self, job: JobRow) -> str | None:
        """Return the modes of all partitions of the job. A pending job may have several."""
        names = filter(None, (job.partition or "").split(","))
        text = "\n".join(self._run(["scontrol", "show", "partition", name]) for name in names)
        return ",".join(re.findall(r"\bPreemptMode=(\S+)", text)) or None

    def _mode_of_qos(self, job: JobRow) -> str | None:
        """Return the mode of the job's QOS, or None where the cluster's mode holds.

        Also returns None where the accounting that knows the QOS cannot be asked from a node.
        """
        columns = ["--noheader", "--parsable2", "format=PreemptMode"]
        try:
            mode = self._run(["sacctmgr", "show", "qos", job.qos, *columns]).strip() if job.qos else ""
        except SlurmError:
            return None
        return None if mode in ("", "cluster") else mode

    def clock(self) -> float:
        answer = self._run(["sdiag"])
        time_of_answer = re.search(r"^sdiag output at .*\((\d+)\)", answer, re.MULTILINE)
        if time_of_answer is None:
            raise SlurmError(f"sdiag does not say what time it is: {answer[:200]!r}")
        return float(time_of_answer[1])

    # ------------------------------------------------------------------------------------------------- asking

    def _queued(self, job_ids: list[str]) -> list[JobStatus]:
        """Ask squeue once for all jobs.

        For several ids squeue would load the jobs of the whole cluster, so it is asked for this user's jobs instead.
        For a single id that the controller does not know, squeue fails.
        """
        ask = ["squeue", "--noheader", "--array", "--states=all", "--format=%i|%T|%N|%r"]
        if len(job_ids) > 1:
            return _parse_statuses(self._run([*ask, f"--user={os.getuid()}"]))
        try:
            return _parse_statuses(self._run([*ask, f"--jobs={_base_id(job_ids[0])}"]))
        except _ProgramFailed as error:
            if not error.says("Invalid job id"):
                raise
            return []

    def _accounted(self, job_ids: list[str]) -> list[JobStatus]:
        """Ask sacct once for the jobs that the controller has forgotten. Empty where accounting is off or down."""
        columns = ["--parsable2", "--format=JobID,State,NodeList"]
        ask = ["sacct", "--allocations", "--noheader", *columns, "--jobs=" + ",".join(job_ids)]
        try:
            return _parse_statuses(self._run(ask))
        except SlurmError:
            return []

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
            environ = _plain_environment(self._environ)
        return _run_program([path, *argv[1:]], timeout_s or self._timeout_s, environ)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])


#: Number and name of each step in the output of `scontrol show step`; the toolkit's step names have no spaces.
_STEP = re.compile(r"^StepId=\S+\.(\w+) .*?^ .*?\bName=(\S+)", re.MULTILINE | re.DOTALL)


class _Failed(SlurmError):
    """A program of Slurm ended with an exit code other than 0."""

    def __init__(self, argv: Sequence[str], code: int, stderr: str) -> None:
        self.stderr = stderr
        words = "\n  ".join(stderr.strip().splitlines()[-5:]) or "(nothing on stderr)"
        super().__init__(f"`{_shown(argv)}` failed with exit code {code}:\n  {words}{_advice(stderr)}")

    def says(self, words: str) -> bool:
        return words.lower() in self.stderr.lower()


class _ProgramFailed(_Failed, SlurmRefusedError):
    """The controller answered and refused."""


class _ProgramUnheard(_Failed):
    """The controller did not answer: it restarts, is overloaded, or cannot be reached over the network."""


#: What Slurm's programs print when no daemon could be reached (slurm_errno.c, 22.05 to 24.11).
_UNHEARD = (
    "Unable to contact slurm controller",
    "Unable to contact slurm database",
    "Socket timed out",
    "Zero Bytes were transmitted",
    "Communication connection failure",
    "Connection refused",
    "Connection reset",
    "slurm_receive_msg",
    "in standby mode",
)

#: Advice for the most frequent failures, by what Slurm prints.
_ADVICE = (
    ("Unable to contact slurm controller", "the controller is down or unreachable: `scontrol ping`, or ask the site"),
    ("Could not establish a configuration source", "set SLURM_CONF to the cluster's slurm.conf"),
    ("Invalid account", "name one of `sacctmgr show associations user=$USER` as cluster.account in the site defaults"),
    ("invalid partition", "name one of `sinfo --summarize` as cluster.partition"),
    ("Requested node configuration is not available", "ask for less: `sinfo -o '%P %D %c %m %G'` shows what there is"),
    ("Job violates accounting/QOS policy", "the account's limits are reached: `sacctmgr show qos`, or ask for less"),
    ("presently disabled", "the job was submitted with --no-requeue, or the site forbids requeueing (JobRequeue=0)"),
)  # fmt: skip


def _advice(stderr: str) -> str:
    found = next((advice for words, advice in _ADVICE if words.lower() in stderr.lower()), None)
    return f"\nWhat to do: {found}" if found else ""


def _shown(argv: Sequence[str]) -> str:
    return " ".join([argv[0].rpartition("/")[2], *argv[1:]])


def _run_program(argv: Sequence[str], timeout_s: float, environ: Mapping[str, str]) -> str:
    """Return the program's stdout. It gets no stdin: a program that asks a question would wait for ever."""
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            env=environ,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise SlurmError(
            f"`{_shown(argv)}` did not answer within {timeout_s:g} s: the controller is busy or unreachable, "
            "SLURM_CONF cannot be read, or the job has no running step to signal; try `scontrol ping` and `squeue`"
        ) from error
    except OSError as error:
        raise SlurmError(f"`{_shown(argv)}` could not be started: {error}") from error
    if done.returncode != 0:
        # Death by a signal is no answer either: Slurm's SIGTERM for a job that it requeues also reaches our children.
        is_unheard = done.returncode < 0 or any(words in done.stderr for words in _UNHEARD)
        failed = _ProgramUnheard if is_unheard else _ProgramFailed
        raise failed(argv, done.returncode, done.stderr)
    return done.stdout


# --------------------------------------------------------------------------------------------------- environments

#: Prefixes of variables by which a user's profile changes the columns, filters and questions of Slurm's programs.
_OUTPUT_CHANGING = ("SQUEUE_", "SACCT_", "SCANCEL_", "SINFO_", "SCONTROL_", "SLURM_TIME_FORMAT", "SLURM_BITSTR_LEN")


def _plain_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` with the C locale, and with times in seconds since the epoch.

    Local times are ambiguous for an hour each autumn.
    """
    kept = {name: value for name, value in environ.items() if not name.startswith(_OUTPUT_CHANGING)}
    return kept | {"LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"}


#: Where Slurm is and which cluster is meant. All other variables of these families describe the current job.
_SITE_VARIABLES = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT"})
_JOB_VARIABLES = ("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SALLOC_", "PMI", "OMPI_COMM_WORLD_", "PRTE_LAUNCHED")
#: One rank's place in one launch. Inherited by another launch they name the wrong rank, see `placement`.
_RANK_VARIABLES = frozenset(
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK", "ROLE_RANK"}
)
_LAUNCH_VARIABLES = _RANK_VARIABLES | {
    "MASTER_ADDR",
    "MASTER_PORT",
    "TOOLKIT_RUN_DIR",
    "TOOLKIT_ATTEMPT",
    "TOOLKIT_OWNER",
    "TOOLKIT_REPORTS",
    "TOOLKIT_SUPERVISED",
    "TOOLKIT_LAUNCH_KEY",
    "TOOLKIT_SUPERVISE_RUN",
    "TOOLKIT_PREDECESSORS",
    "TOOLKIT_SUBMISSION",
}


def submit_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment to submit a new job from, also from inside a running job.

    sbatch takes options from SBATCH_* and SLURM_* and hands its environment on to the job: an inherited
    SLURM_CPU_BIND pins the new job's ranks to the old job's cores, and an inherited RANK names the wrong rank.
    """
    strange = (*_JOB_VARIABLES, "TORCHELASTIC_")
    return {
        name: value
        for name, value in environ.items()
        if name in _SITE_VARIABLES or not (name in _LAUNCH_VARIABLES or name.startswith(strange))
    }


#: Variables by which the batch script describes itself and which srun reads as options (srun(1), INPUT ENVIRONMENT).
#: After the allocation has shrunk they contradict it. The command line gives everything that they say.
_STEP_OPTIONS = frozenset(
    {
        "SLURM_NNODES",
        "SLURM_JOB_NUM_NODES",
        "SLURM_NPROCS",
        "SLURM_CPUS_PER_TASK",
        "SLURM_TRES_PER_TASK",
        "SLURM_DISTRIBUTION",
        "SLURM_HOSTFILE",
        "SLURM_KILL_BAD_EXIT",
        "SLURM_WAIT",
        "SLURM_OPEN_MODE",
        "SLURM_EXPORT_ENV",
        "SLURM_EXACT",
        "SLURM_EXCLUSIVE",
        "SLURM_OVERLAP",
        "SLURM_LABELIO",
        "SLURM_STDOUTMODE",
        "SLURM_STDERRMODE",
        "SLURM_STDINMODE",
        "SLURM_MULTI_PROG",
        "SLURM_THREADS_PER_CORE",
        "SLURM_NO_KILL",
        "SLURM_STEP_ID",
        "SLURM_STEPID",
    }
)
_STEP_OPTION_FAMILIES = (
    "SLURM_NTASKS",
    "SLURM_CPU_BIND",
    "SLURM_MEM_BIND",
    "SLURM_MEM_PER_",
    "SLURM_GPUS_PER_TASK",
    "SRUN_",
    "PMI",
)


def step_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for an ``srun`` inside an allocation, which gets all options on its command line."""
    return {
        name: value
        for name, value in environ.items()
        if name not in _STEP_OPTIONS | _RANK_VARIABLES and not name.startswith(_STEP_OPTION_FAMILIES)
    }


@dataclass(frozen=True)
class SrunStep:
    """One srun step: what runs where. ``hosts`` has one entry per rank, in rank order."""

    command: Sequence[str]
    hosts: Sequence[str]
    cpus_per_task: int | None  #: None: all CPUs of the job on each node, as a step beside others may have
    output: str | None  #: srun's file name pattern, such as ``logs/rank-%t.log``; None: srun's own stdout
    name: str | None = None  #: the name by which `SlurmCommands.find_step` finds the step
    mpi: str | None = None
    overlap: bool = False  #: beside running ranks; without it such a step waits for ever
    extra: Sequence[str] = ()


def srun_argv(step: SrunStep) -> list[str]:
    """Return the command line of ``step``. Its SLURM_HOSTFILE must hold ``step.hosts``, one per line.

    srun itself kills nothing (``--kill-on-bad-exit=0 --wait=0``): otherwise the first rank to stop cleanly would end
    the others. Ranks always get ``--cpus-per-task``: 22.05 to 23.11 do not inherit it. Never ``--nodes``: the host file
    names the nodes, and 24.11 refuses both together.
    """
    return [
        "srun",
        f"--ntasks={len(step.hosts)}",
        *([] if step.cpus_per_task is None else [f"--cpus-per-task={step.cpus_per_task}"]),
        # The ranks' nodes are those of the host file, line by line.
        "--distribution=arbitrary",
        "--kill-on-bad-exit=0",
        "--wait=0",
        *([] if step.output is None else [f"--output={step.output}", "--open-mode=append"]),
        "--export=ALL",
        *([f"--job-name={step.name}"] if step.name else []),
        *([f"--mpi={step.mpi}"] if step.mpi else []),
        *(["--overlap"] if step.overlap else []),
        *step.extra,
        *step.command,
    ]


def srun_here_argv(command: Sequence[str]) -> list[str]:
    """Return the command line that runs ``command`` once on this node of the job.

    It runs beside all else there. ``command`` may begin with srun's options.
    """
    here = f"--nodelist={os.environ.get('SLURMD_NODENAME') or socket.gethostname()}"
    return ["srun", "--nodes=1", "--ntasks=1", here, "--overlap", "--unbuffered", "--export=ALL", *command]


def srun_nodes_argv(command: Sequence[str], nodes: int, options: Sequence[str]) -> list[str]:
    """Return the command line that runs ``command`` once on each of ``nodes`` new nodes.

    It asks Slurm for the nodes, from a login node.
    """
    size = [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
    return ["srun", *size, "--kill-on-bad-exit=0", "--wait=0", "--label", *options, *command]


# --------------------------------------------------------------------------------------------------------- parsing

#: Fields that take the rest of their line: users write spaces and ``=`` into them.
_FREE_TEXT = frozenset(
    {"JobName", "Comment", "AdminComment", "SystemComment", "Extra", "Command", "WorkDir", "StdErr", "StdIn", "StdOut"}
)
_NOTHING = frozenset({"", "(null)", "None", "None assigned", "N/A", "Unknown"})


def parse_jobs(text: str) -> list[JobRow]:
    """Return the jobs in the output of ``scontrol show job``, in its form of several lines.

    Not ``--oneliner``: there a comment such as ``x JobState=FAILED`` would read as a field. Here a free text ends where
    its line ends. Of a field that appears twice the first, Slurm's own, counts.
    """
    return [_row(_fields(record)) for record in re.split(r"\n(?=JobId=)", text) if record.startswith("JobId=")]


def parse_drained(text: str) -> dict[str, str]:
    """Return the drained or draining nodes in ``scontrol show node``'s output, each with the reason.

    A state is ``MIXED+DRAIN``, with ``*`` behind a part if the node does not answer. The reason ends with who gave it
    and when: ``new fan [root@1795417311]``.
    """
    found = {}
    for record in re.split(r"\n(?=NodeName=)", text):
        name, state = re.match(r"NodeName=(\S+)", record), re.search(r"^ +State=(\S+)", record, re.MULTILINE)
        reason = re.search(r"^ +Reason=(.*?)(?: \[([^\s@]+)@\S+\])?$", record, re.MULTILINE)
        if name and state and "DRAIN" in re.split(r"\W", state[1]):
            found[name[1]] = "no reason given" if reason is None else " by ".join(filter(None, reason.groups()))
    return found


def _fields(record: str) -> dict[str, str]:
    fields: dict[str, str] = {}
    for line in record.splitlines():
        for name, value in _fields_of_line(line.strip()):
            fields.setdefault(name, value)
    return {name: value for name, value in fields.items() if value not in _NOTHING}


def _fields_of_line(line: str) -> Iterator[tuple[str, str]]:
    while line:
        name, _, rest = line.partition("=")
        if name in _FREE_TEXT:
            yield name, rest
            return
        value, _, line = rest.partition(" ")
        yield name, value
        line = line.strip()


def _row(fields: Mapping[str, str]) -> JobRow:
    code, signal = _exit(fields.get("ExitCode"))
    return JobRow(
        job_id=fields["JobId"],
        state=states.canonical(fields.get("JobState", "")),
        reason=fields.get("Reason"),
        name=fields.get("JobName"),
        array_job_id=fields.get("ArrayJobId"),
        array_task_id=fields.get("ArrayTaskId"),
        restarts=int(fields.get("Restarts", "0")),
        can_requeue=fields.get("Requeue", "1") != "0",
        is_expedited=fields.get("ExpeditedRequeue") == "Yes",
        submit_time=parse_time(fields.get("SubmitTime")),
        start_time=parse_time(fields.get("StartTime")),
        end_time=parse_time(fields.get("EndTime")),
        preempt_time=parse_time(fields.get("PreemptTime")),
        time_limit_s=parse_duration(fields.get("TimeLimit")),
        partition=fields.get("Partition"),
        qos=fields.get("QOS"),
        node_list=fields.get("NodeList", ""),
        excluded=fields.get("ExcNodeList", ""),
        options=tuple(_options(fields)),
        batch_host=fields.get("BatchHost"),
        exit_code=code,
        exit_signal=signal,
        command=fields.get("Command"),
        work_dir=fields.get("WorkDir"),
        stdout_path=fields.get("StdOut"),
    )


#: sbatch's options, by the fields in which scontrol shows them.
_OPTIONS = {"Features": "constraint", "ExcNodeList": "exclude", "ReqNodeList": "nodelist", "Licenses": "licenses"}
_OPTIONS_OF_GPUS = {"TresPerJob": "gpus", "TresPerTask": "gpus-per-task", "MemPerTres": "mem-per-gpu"}
_EXCLUSIVE = {"NO": "--exclusive", "USER": "--exclusive=user", "MCS": "--exclusive=mcs"}
#: ``gres:gpu:a100:4`` in Slurm 22.05, ``gres/gpu:a100:4`` since 23.02; since 24.05 with ``=`` before a task's number.
_GRES = re.compile(r"gres[:/]([^,]+)")


def _options(fields: Mapping[str, str]) -> Iterator[str]:
    """Yield sbatch's options, read back from scontrol's output, wherever the user wrote them."""
    for field, option in _OPTIONS.items():
        if field in fields:
            yield f"--{option}={fields[field]}"
    # GPUs and other generic resources stand in TRES strings: those of a node, then those of the job or a task.
    gres = [item.replace("=", ":") for item in _GRES.findall(fields.get("TresPerNode", ""))]
    if gres:
        yield f"--gres={','.join(gres)}"
    for field, option in _OPTIONS_OF_GPUS.items():
        for item in _GRES.findall(fields.get(field, "")):
            name, _, number = item.replace("=", ":").partition(":")
            if name == "gpu":
                yield f"--{option}={number}"
    # Exclusive use is shown as a value of OverSubscribe.
    if fields.get("OverSubscribe") in _EXCLUSIVE:
        yield _EXCLUSIVE[fields["OverSubscribe"]]


def parse_time(text: str | None) -> float | None:
    """Return seconds since the epoch for ``1795190400`` or ``2026-11-20T16:00:00`` (local time), else ``None``."""
    if text is None or text in _NOTHING:
        return None
    if text.isdigit():
        return float(text)
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None


_DURATION = re.compile(r"(?:([0-9]+)-)?([0-9]+):([0-9]+)(?::([0-9]+))?")


def parse_duration(text: str | None) -> float | None:
    """Return the seconds in ``1-02:03:04``, ``02:03:04`` or ``03:04``; ``None`` for UNLIMITED and Partition_Limit."""
    match = _DURATION.fullmatch(text or "")
    if match is None:
        return None
    days, *clock = match.groups()
    hours, minutes, seconds = clock if clock[2] is not None else ["0", *clock[:2]]
    return float(((int(days or 0) * 24 + int(hours)) * 60 + int(minutes)) * 60 + int(seconds))


def _exit(text: str | None) -> tuple[int | None, int | None]:
    """Parse an exit code and a signal: ``1:0`` is exit code 1 and no signal."""
    match = re.fullmatch(r"([0-9]+):([0-9]+)", text or "")
    return (int(match[1]), int(match[2])) if match else (None, None)


def _parse_statuses(text: str) -> list[JobStatus]:
    return [_status(line) for line in text.splitlines() if line.count("|") >= 2]


def _status(line: str) -> JobStatus:
    # The reason is squeue's last column; sacct is not asked for it.
    job_id, state, node_list, *reason = line.split("|", 3)
    why = reason[0] if reason and reason[0] not in _NOTHING else None
    return JobStatus(job_id.strip(), states.canonical(state), why, "" if node_list in _NOTHING else node_list)


def _base_id(job_id: str) -> str:
    """Return an id that every squeue takes. It takes ``A_T`` only for array elements that it has split off."""
    return re.split(r"[_+]", job_id)[0]


def _match(job_ids: Iterable[str], rows: Sequence[JobStatus]) -> dict[str, JobStatus | None]:
    """Return the row of each id. A whole array or het job gets an unfinished member's row, while there is one."""
    by_id: dict[str, list[JobStatus]] = {}
    for row in rows:
        # The row of an array element or het component also stands for the whole job.
        for name in {row.job_id, re.split(r"[_+]", row.job_id)[0]}:
            by_id.setdefault(name, []).append(row)
    return {job_id: _present(by_id.get(job_id, [])) for job_id in job_ids}


def _present(rows: Sequence[JobStatus]) -> JobStatus | None:
    return next((row for row in rows if not row.is_over), rows[-1] if rows else None)
