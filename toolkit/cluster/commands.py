"""The one place that runs Slurm's programs, and the one that knows how their text reads.

Every call is an argv list with a time limit, in the C locale, free of the variables with which a user's profile changes
the output (SQUEUE_FORMAT and the like). A program that fails is a `SlurmError` with its own last words. A question that
nobody answers (accounting off, controller busy) is ``None``: unknown is never "dead".
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

from toolkit.cluster import states
from toolkit.cluster.reachable import DEFAULT_SLURMD_PORT
from toolkit.errors import SlurmError, SlurmRefusedError

#: Long enough for a busy controller, short enough for a reader who waits. Without a readable SLURM_CONF Slurm's
#: programs retry for 60 s before they fail.
TIMEOUT_S = 30.0
PROBE_TIMEOUT_S = 5.0
#: The first version in which a job with ``--requeue=expedite`` that ends with exit code 0 is not held in the queue.
EXPEDITES_SINCE = (25, 11, 3)


@dataclass(frozen=True)
class JobRow:
    """One job as ``scontrol show job`` tells it. Times are seconds since the epoch, ``None`` where Slurm has none."""

    job_id: str
    state: str  #: long form, see `toolkit.cluster.states`
    reason: str | None = None
    name: str | None = None
    array_job_id: str | None = None
    array_task_id: str | None = None
    restarts: int = 0
    can_requeue: bool = True
    is_expedited: bool = False  #: see `SlurmCommands.forbid_requeue`
    submit_time: float | None = None
    start_time: float | None = None  #: while pending: Slurm's estimate
    end_time: float | None = None  #: while running: when the limit, or the grace of a preemption, ends it
    preempt_time: float | None = None
    time_limit_s: float | None = None  #: None: unlimited, or the partition's
    partition: str | None = None
    qos: str | None = None
    node_list: str = ""
    excluded: str = ""  #: node list, as asked for
    options: tuple[str, ...] = ()  #: of sbatch: what was asked for beside sizes, which the job's environment tells
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
        """The id to requeue: of an array element ``ARRAY_TASK``, because the bare id requeues the whole array."""
        is_element = self.array_job_id is not None and (self.array_task_id or "").isdigit()
        return f"{self.array_job_id}_{self.array_task_id}" if is_element else self.job_id


@dataclass(frozen=True)
class JobStatus:
    """The little that both squeue and sacct know of a job."""

    job_id: str
    state: str
    reason: str | None = None
    node_list: str = ""

    @property
    def is_over(self) -> bool:
        return states.is_over(self.state)


@dataclass(frozen=True)
class Settings:
    """What we go by of a cluster's configuration, with Slurm's own defaults."""

    slurmd_port: int = DEFAULT_SLURMD_PORT  #: on which every node's slurmd listens
    mpi_default: str = "none"  #: the plugin for ranks over MPI that an srun has which names none
    task_plugins: str = "task/none"  #: whether each task is bound to CPUs of its own
    preempt_type: str = "preempt/none"
    preempt_mode: str = "OFF"  #: where neither a partition nor a QOS says another
    kill_wait_s: float = 30.0  #: from SIGTERM to SIGKILL for a job that is ended, its batch script included
    expedites: bool = False  #: whether jobs may ask for ``--requeue=expedite``


class SlurmCommands(Protocol):
    """What the rest of the toolkit asks of Slurm; `Slurm` and `toolkit.cluster.fake.FakeSlurm` answer."""

    def available(self) -> bool:
        """Whether jobs can be submitted here: sbatch exists and a controller answers within seconds."""
        ...

    def show_job(self, job_id: str) -> JobRow | None:
        """The job, or ``None`` when the controller no longer knows it."""
        ...

    def show_jobs(self, job_ids: Iterable[str]) -> dict[str, JobStatus | None]:
        """Every id asked for with its status, ``None`` where nobody knows. Asks once for all."""
        ...

    def cancel(self, job_id: str, *, signal: str | None = None, step: str | None = None, batch: bool = False) -> None:
        """End a job or one step of it, or send a signal: to all its steps, or (``batch``) to the batch shell only.

        To end a job that is over or unknown is no error. A signal needs a running job with steps: scancel waits for
        one of a job that is pending or ending, until the time limit.
        """
        ...

    def find_step(self, job_id: str, name: str) -> str | None:
        """The number of the job's running step of this name, or ``None``."""
        ...

    def requeue(self, job_id: str, *, if_running: bool = False) -> None:
        """Put the job back into the queue; no error if Slurm has done so already. Name array elements ``A_T``.

        A plain requeue also revives a job that somebody has cancelled and that is completing. With ``if_running`` such
        a job stays cancelled, and that is no error either: look at the job afterwards.
        """
        ...

    def forbid_requeue(self, job_id: str) -> None:
        """Have Slurm never requeue the job from now on.

        One with ``--requeue=expedite`` goes back into the queue, and is held there, also if its batch script ends with
        an exit code other than 0 (``_set_job_requeue_exit_value`` in Slurm's job_mgr.c). One that may not be requeued
        does not.
        """
        ...

    def expedites(self) -> bool:
        """Whether the site allows ``--requeue=expedite``, and sbatch knows it."""
        ...

    def exclude_nodes(self, job_id: str, node_list: str) -> None:
        """Keep a pending job off these nodes. Slurm refuses this for a running job: requeue first."""
        ...

    def drained(self, node_list: str) -> dict[str, str]:
        """Return which of these nodes take no new jobs (DRAIN), and the reason with who gave it. Asks once for all."""
        ...

    def release_nodes(self, job_id: str, *, keep: str) -> None:
        """Give back the nodes of a running job but for the node list ``keep``; steps go on there.

        A requeued job gets as many nodes as it was submitted with. A site may refuse it (``disable_job_shrink``).
        """
        ...

    def sbatch(self, arguments: Sequence[str]) -> str:
        """Submit with these arguments (options, then the script's path) and return the job id."""
        ...

    def could_run(self, arguments: Sequence[str]) -> bool:
        """Whether a job with these options could ever start. One that could not is held for ever, without a word."""
        ...

    def settings(self) -> Settings:
        """How this cluster is set up."""
        ...

    def clock(self) -> float:
        """The controller's time, by which a job's times are, in seconds since the epoch."""
        ...

    def preemption_cancels(self, job: JobRow, settings: Settings) -> bool:
        """Whether a preemption ends this job for good, instead of requeueing or suspending it."""
        ...


class Slurm:
    """The real one. ``environ`` stands for ``os.environ`` and also says, by its PATH, where the programs are."""

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
        rows = parse_jobs(text)
        return next((row for row in rows if job_id in (row.job_id, row.requeue_id)), rows[0] if rows else None)

    def show_jobs(self, job_ids: Iterable[str]) -> dict[str, JobStatus | None]:
        wanted = list(dict.fromkeys(job_ids))
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
        # --all: also where the partition is hidden
        return parse_drained(self._run(["scontrol", "--all", "show", "node", node_list]))

    def release_nodes(self, job_id: str, *, keep: str) -> None:
        # Not the plain environment: in a job's, scontrol leaves scripts in the working directory (update_job.c).
        environ = submit_environment(self._environ)
        self._run(["scontrol", "update", f"JobId={job_id}", f"NodeList={keep}"], environ=environ)

    def sbatch(self, arguments: Sequence[str]) -> str:
        # Not the plain environment: sbatch hands what it gets on to the job.
        answer = self._run(["sbatch", "--parsable", *arguments], environ=submit_environment(self._environ))
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
        """The long names of all options that sbatch lists, those of the site's plugins among them."""
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
            expedites="enable_expedited_requeue" in found.get("SlurmctldParameters", "")
            and _version(found.get("SLURM_VERSION", "")) >= EXPEDITES_SINCE,
        )

    def preemption_cancels(self, job: JobRow, settings: Settings) -> bool:
        asked = {"preempt/partition_prio": self._mode_of_partition, "preempt/qos": self._mode_of_qos}
        ask = asked.get(settings.preempt_type)
        return ask is not None and "CANCEL" in (ask(job) or settings.preempt_mode).upper()

    def _mode_of_partition(self, job: JobRow) -> str | None:
        """Those of all its partitions, of which a pending job may have several."""
        names = filter(None, (job.partition or "").split(","))
        text = "\n".join(self._run(["scontrol", "show", "partition", name]) for name in names)
        return ",".join(re.findall(r"\bPreemptMode=(\S+)", text)) or None

    def _mode_of_qos(self, job: JobRow) -> str | None:
        """None, for the cluster's, also where the accounting that knows the QOS cannot be asked from a node."""
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
        """One squeue for all. For several ids it would load the jobs of the whole cluster: it is asked for ours then.

        For a single id that the controller does not know it fails.
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
        """One sacct for those that the controller has forgotten; none where accounting is off or down."""
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


#: Number and name of each step that `scontrol show step` tells of; a name of ours has no spaces.
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
    """The controller answered, and refused."""


class _ProgramUnheard(_Failed):
    """The controller did not answer: it restarts, is overloaded, or the network is away."""


#: How Slurm's programs say that they reached nobody (slurm_errno.c, 22.05 to 24.11).
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

#: What to do about the failures that readers meet most.
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
    """The program's stdout. It gets no stdin: a program that asks a question would wait for ever."""
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
        # A signal is no answer either: Slurm's SIGTERM for a job that it requeues reaches our children, too.
        is_unheard = done.returncode < 0 or any(words in done.stderr for words in _UNHEARD)
        failed = _ProgramUnheard if is_unheard else _ProgramFailed
        raise failed(argv, done.returncode, done.stderr)
    return done.stdout


# --------------------------------------------------------------------------------------------------- environments

#: A user's profile changes the columns, filters and questions of Slurm's programs through variables of these names.
_OUTPUT_CHANGING = ("SQUEUE_", "SACCT_", "SCANCEL_", "SINFO_", "SCONTROL_", "SLURM_TIME_FORMAT", "SLURM_BITSTR_LEN")


def _plain_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """C locale, and times as seconds since the epoch: local times are ambiguous for an hour each autumn."""
    kept = {name: value for name, value in environ.items() if not name.startswith(_OUTPUT_CHANGING)}
    return kept | {"LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"}


#: Where Slurm is and which cluster is meant; everything else of these families describes the job we are in.
_SITE_VARIABLES = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT"})
_JOB_VARIABLES = ("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SALLOC_", "PMI", "OMPI_COMM_WORLD_", "PRTE_LAUNCHED")
#: One rank's place in one launch: inherited by another launch they name the wrong rank, see `placement`.
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
    """The environment to submit a new job from, also out of a running one.

    sbatch takes its options from SBATCH_* and SLURM_* and hands everything on to the job: an inherited
    SLURM_CPU_BIND pins the new job's ranks to the old job's cores, an inherited RANK names the wrong rank.
    """
    strange = (*_JOB_VARIABLES, "TORCHELASTIC_")
    return {
        name: value
        for name, value in environ.items()
        if name in _SITE_VARIABLES or not (name in _LAUNCH_VARIABLES or name.startswith(strange))
    }


#: What srun reads as options although the batch script only describes itself with it (srun(1), INPUT ENVIRONMENT).
#: After the allocation has shrunk they contradict it; everything they say goes on the command line instead.
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
    """The environment for an ``srun`` inside an allocation, whose options stand all on its command line."""
    return {
        name: value
        for name, value in environ.items()
        if name not in _STEP_OPTIONS | _RANK_VARIABLES and not name.startswith(_STEP_OPTION_FAMILIES)
    }


@dataclass(frozen=True)
class Step:
    """One srun step: what runs where. ``hosts`` has one entry per rank, in rank order."""

    command: Sequence[str]
    hosts: Sequence[str]
    cpus_per_task: int | None  #: None: all CPUs of the job on each node, as a step beside others may have
    output: str | None  #: srun's file name pattern, such as ``logs/rank-%t.log``; None: srun's own stdout
    name: str | None = None  #: by which `SlurmCommands.find_step` finds it
    mpi: str | None = None
    overlap: bool = False  #: beside running ranks; without it such a step waits for ever
    extra: Sequence[str] = ()


def srun_argv(step: Step) -> list[str]:
    """The command line of ``step``; its SLURM_HOSTFILE must hold ``step.hosts``, one per line.

    srun itself kills nothing (``--kill-on-bad-exit=0 --wait=0``): the first rank to stop cleanly would otherwise take
    the others with it. ``--cpus-per-task`` always for ranks: 22.05 to 23.11 do not inherit it. Never ``--nodes``: the
    host file says which they are, and 24.11 refuses both together.
    """
    return [
        "srun",
        f"--ntasks={len(step.hosts)}",
        *([] if step.cpus_per_task is None else [f"--cpus-per-task={step.cpus_per_task}"]),
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
    """The command line that runs ``command``, which may begin with srun's options, once on this node of the job,
    beside all else that runs there."""
    here = f"--nodelist={os.environ.get('SLURMD_NODENAME') or socket.gethostname()}"
    return ["srun", "--nodes=1", "--ntasks=1", here, "--overlap", "--unbuffered", "--export=ALL", *command]


def srun_nodes_argv(command: Sequence[str], nodes: int, options: Sequence[str]) -> list[str]:
    """The command line that asks Slurm for ``nodes`` nodes and runs ``command`` once on each, from a login node."""
    size = [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
    return ["srun", *size, "--kill-on-bad-exit=0", "--wait=0", "--label", *options, *command]


# --------------------------------------------------------------------------------------------------------- parsing

#: Fields that take the rest of their line: users write spaces and ``=`` into them.
_FREE_TEXT = frozenset(
    {"JobName", "Comment", "AdminComment", "SystemComment", "Extra", "Command", "WorkDir", "StdErr", "StdIn", "StdOut"}
)
_NOTHING = frozenset({"", "(null)", "None", "None assigned", "N/A", "Unknown"})


def parse_jobs(text: str) -> list[JobRow]:
    """The records of ``scontrol show job``, in its form of several lines.

    Not ``--oneliner``: a comment such as ``x JobState=FAILED`` would be a field there. On lines of their own free
    texts end where the line ends, and of a field that appears twice the first, Slurm's own, counts.
    """
    return [_row(_fields(record)) for record in re.split(r"\n(?=JobId=)", text) if record.startswith("JobId=")]


def parse_drained(text: str) -> dict[str, str]:
    """The nodes among the records of ``scontrol show node`` that are drained or draining, each with the reason.

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


_OPTIONS = {"Features": "constraint", "ExcNodeList": "exclude", "ReqNodeList": "nodelist", "Licenses": "licenses"}
_OPTIONS_OF_GPUS = {"TresPerJob": "gpus", "TresPerTask": "gpus-per-task", "MemPerTres": "mem-per-gpu"}
_EXCLUSIVE = {"NO": "--exclusive", "USER": "--exclusive=user", "MCS": "--exclusive=mcs"}
#: ``gres:gpu:a100:4`` in Slurm 22.05, ``gres/gpu:a100:4`` since 23.02, with ``=`` before a task's number since 24.05.
_GRES = re.compile(r"gres[:/]([^,]+)")


def _options(fields: Mapping[str, str]) -> Iterator[str]:
    """sbatch's options, read back from what scontrol shows of a job, wherever they were written."""
    for field, option in _OPTIONS.items():
        if field in fields:
            yield f"--{option}={fields[field]}"
    gres = [item.replace("=", ":") for item in _GRES.findall(fields.get("TresPerNode", ""))]
    if gres:
        yield f"--gres={','.join(gres)}"
    for field, option in _OPTIONS_OF_GPUS.items():
        for item in _GRES.findall(fields.get(field, "")):
            name, _, number = item.replace("=", ":").partition(":")
            if name == "gpu":
                yield f"--{option}={number}"
    if fields.get("OverSubscribe") in _EXCLUSIVE:
        yield _EXCLUSIVE[fields["OverSubscribe"]]


def parse_time(text: str | None) -> float | None:
    """Seconds since the epoch from ``1795190400`` or ``2026-11-20T16:00:00`` (local time); ``None`` for all else."""
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
    """Seconds from ``1-02:03:04`` or ``02:03:04`` or ``03:04``; ``None`` for UNLIMITED and Partition_Limit."""
    match = _DURATION.fullmatch(text or "")
    if match is None:
        return None
    days, *clock = match.groups()
    hours, minutes, seconds = clock if clock[2] is not None else ["0", *clock[:2]]
    return float(((int(days or 0) * 24 + int(hours)) * 60 + int(minutes)) * 60 + int(seconds))


def _exit(text: str | None) -> tuple[int | None, int | None]:
    """``1:0`` is exit code 1 by no signal."""
    match = re.fullmatch(r"([0-9]+):([0-9]+)", text or "")
    return (int(match[1]), int(match[2])) if match else (None, None)


def _parse_statuses(text: str) -> list[JobStatus]:
    return [_status(line) for line in text.splitlines() if line.count("|") >= 2]


def _status(line: str) -> JobStatus:
    job_id, state, node_list, *reason = line.split("|", 3)
    told = reason[0] if reason and reason[0] not in _NOTHING else None
    return JobStatus(job_id.strip(), states.canonical(state), told, "" if node_list in _NOTHING else node_list)


def _base_id(job_id: str) -> str:
    """An id that every squeue takes; of an array's element it takes ``A_T`` only from those it has split off."""
    return re.split(r"[_+]", job_id)[0]


def _match(job_ids: Iterable[str], rows: Sequence[JobStatus]) -> dict[str, JobStatus | None]:
    """Each id with its row; a whole array or a het job with one of its unfinished members, while there is one."""
    by_id: dict[str, list[JobStatus]] = {}
    for row in rows:
        for name in {row.job_id, re.split(r"[_+]", row.job_id)[0]}:
            by_id.setdefault(name, []).append(row)
    return {job_id: _present(by_id.get(job_id, [])) for job_id in job_ids}


def _present(rows: Sequence[JobStatus]) -> JobStatus | None:
    return next((row for row in rows if not row.is_over), rows[-1] if rows else None)
