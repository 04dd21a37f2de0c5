"""A class for each file of a run folder, and the states of a run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from toolkit.base import hostlist
from toolkit.base.errors import RequestError
from toolkit.base.procfs import ProcessIdentity
from toolkit.files.records import MOMENT, TIME_TEXT, WORD, FileRecord, JsonRecord, Scalar, one_of


class RunState(StrEnum):
    """How a run stands."""

    QUEUED = "queued"  #: submitted, and not started yet
    REQUEUED = "requeued"  #: back in the queue, or left to a follow-up job
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    RESTARTING = "restarting"  #: between two attempts of one job
    COMPLETED = "completed"
    STOPPED = "stopped"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_waiting(self) -> bool:
        """True for a run that waits for Slurm."""
        return self in (RunState.QUEUED, RunState.REQUEUED)

    @property
    def has_ranks(self) -> bool:
        """True while ranks may run."""
        return self in (RunState.STARTING, RunState.RUNNING, RunState.STOPPING)

    @property
    def is_cut_short(self) -> bool:
        """True for a run that was ended early, and not by a failure."""
        return self in (RunState.STOPPED, RunState.CANCELLED)

    @property
    def is_over(self) -> bool:
        """True for a run that has ended: only a user starts it again."""
        return not (self.is_waiting or self.has_ranks or self is RunState.RESTARTING)


#: The word, in tables, for a run that has a file that cannot be read. Whether it continues is not known.
UNREADABLE = "unreadable"


def state_word(shown: str) -> str:
    """Return the state in a table's text: ``lost`` of ``lost (FAILED)``, ``running`` of ``running? (silent)``."""
    return re.split(r"\?? \(", shown)[0]


Moment: TypeAlias = Annotated[float, MOMENT]
Word: TypeAlias = Annotated[str, WORD]
#: Seconds by name, see `toolkit.metrics.goodput`.
Seconds: TypeAlias = Mapping[str, float]
Metrics: TypeAlias = Mapping[str, float | None]


@lru_cache(maxsize=16)
def _hosts(text: str) -> tuple[str, ...] | None:
    """Return the names in a host list. None if it is none. Cached: most attempts of a run have the same nodes."""
    try:
        return tuple(hostlist.expand(text))
    except RequestError:
        return None


_TIME = replace(
    TIME_TEXT,
    load=lambda text: datetime.fromisoformat(text).timestamp(),
    dump=lambda seconds: datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds"),
)
#: Seconds since the epoch, as text in the file.
Time: TypeAlias = Annotated[float, _TIME]
_HOST_LIST = Scalar(
    "a host list",
    lambda value: isinstance(value, str) and _hosts(value) is not None,
    lambda text: _hosts(text) or (),
    hostlist.compress,
)
#: Names of nodes, as a host list in the file: there may be thousands.
Hosts: TypeAlias = Annotated[tuple[str, ...], _HOST_LIST]


# ------------------------------------------------------------------------------------------------------ parts of files


@dataclass(frozen=True)
class AttemptStart(JsonRecord):
    """What led to an attempt. Times in seconds since the epoch."""

    since: Moment  #: the end of the last attempt, or the run's submission
    submitted: Moment | None  #: when the job was submitted or requeued; None for a restart within the job
    queue_s: float
    ready: Moment  #: the start of the job, or the decision to start again
    best_step: int  #: the furthest step of any earlier attempt
    marks: Seconds = field(default_factory=dict)  #: when the agents were ready, see `toolkit.metrics.start_up`


@dataclass(frozen=True)
class Straggler(JsonRecord):
    """A node with ranks that are, or were, slow for long. Times in seconds since the epoch."""

    host: Word
    ranks: tuple[int, ...]
    ratio: float  #: to the other ranks: a mean from ``since`` to ``until`` for each of its ranks, of these the median
    since: Moment
    until: Moment | None  #: None while it is slow


#: Rank 0's phase after a stop that is committed.
STOPPED_PHASE = "stopped"


@dataclass(frozen=True)
class RunProgress(JsonRecord):
    """Rank 0's report, see `toolkit.train.loop`."""

    step: int | None = None
    step_start: int | None = None
    total_steps: int | None = None
    epoch: int | None = None
    epochs: int | None = None
    samples: int | None = None
    loss: float | None = None
    samples_per_s: float | None = None
    data_wait_fraction: float | None = None
    step_saved: int | None = None  #: the newest checkpoint
    save_s: float | None = None
    save_error: str | None = None  #: of the saves since the last good one
    eta_s: float | None = None
    phase: str | None = None  #: :data:`STOPPED_PHASE` only when a stop is committed
    spent: Seconds = field(default_factory=dict)
    start_up: Seconds = field(default_factory=dict)  #: see `toolkit.ranks.session`
    stragglers: tuple[Straggler, ...] = ()
    metrics: Metrics = field(default_factory=dict)


@dataclass(frozen=True)
class OutputFigures(JsonRecord):
    """What a script has printed about its progress, and the newest of its own checkpoints, as far as can be guessed."""

    step: int | None = None
    total_steps: int | None = None  #: perhaps those of an epoch
    epoch: int | None = None
    epochs: int | None = None
    loss: float | None = None
    steps_per_s: float | None = None
    eta_s: float | None = None
    checkpoint: str | None = None
    checkpoint_saved: Moment | None = None  #: seconds since the epoch


@dataclass(frozen=True)
class JobUsage(JsonRecord):
    """What a job has held and used, up to its last sample. Times in seconds since the epoch.

    Figures "of a node" are those of the node with the most. Of GPUs that nothing is known of, all figures are 0.
    """

    job_id: str | None = None  #: None without Slurm
    since: Moment = 0.0
    until: Moment = 0.0  #: the last sample
    wall_s: float = 0.0
    # asked
    nodes: int = 0
    tasks_per_node: int = 0
    cpus_per_task: int = 0
    cpus: int = 0  #: that the job has, on all nodes
    memory_bytes: int | None = None  #: of a node; None: Slurm sets no limit, or did not say
    time_limit_s: float | None = None
    gpus_per_node: int = 0
    # used
    cpu_s: float = 0.0
    cpu_held_s: float = 0.0
    busy_cpus: float = 0.0  #: at the last sample, on all nodes
    most_cpus: float = 0.0  #: of a node, over some seconds
    used_bytes: int = 0  #: memory of a node, at the last sample
    shared_bytes: int = 0  #: the part of it that several processes may use
    most_bytes: int = 0  #: memory of a node
    most_bytes_host: str | None = None
    gpu_s: float = 0.0  #: busy
    gpu_held_s: float = 0.0
    busy_gpus: float = 0.0  #: at the last sample, on all nodes
    most_gpus: int = 0  #: of a node, that were ever busy
    most_gpu_bytes: int = 0  #: memory of a GPU
    power_w: float = 0.0  #: of all GPUs, at the last sample
    energy_j: float = 0.0  #: of all GPUs
    read_bytes: int = 0
    written_bytes: int = 0
    received_bytes: int = 0  #: of the nodes, over all networks
    sent_bytes: int = 0
    unused_gpus: tuple[str, ...] = ()  #: that no rank has used in this attempt, minutes after its start


@dataclass(frozen=True)
class PriceRecord(JsonRecord):
    """What an hour costs at this site."""

    cpu_hour: float = 0.0
    gpu_hour: float = 0.0
    currency: str | None = None


@dataclass(frozen=True)
class RunUsage(FileRecord):
    """``usage.json``: what each job of the run has held and used."""

    jobs: tuple[JobUsage, ...] = ()
    price: PriceRecord | None = None


@dataclass(frozen=True)
class Efficiency(JsonRecord):
    """What a run has used of what it had, and how to ask next time. All its jobs count."""

    jobs: int
    usage: JobUsage
    sbatch: str | None = None
    cost: float | None = None
    idle_cost: float | None = None  #: the part of the cost for processors and GPUs that were idle
    currency: str | None = None


# --------------------------------------------------------------------------------------------------------- status.json


@dataclass(frozen=True)
class AttemptStatus(FileRecord):
    """How a run stands, by the supervisor of its present attempt. Times in seconds since the epoch."""

    state: RunState | None = None
    run: str | None = None
    job_id: str | None = None
    cluster: str = ""  #: whose number that is
    restart_count: int | None = None
    host: str | None = None
    pid: int | None = None
    birth: str = ""  #: of the process, see `toolkit.base.procfs`
    attempt: int | None = None
    nodes: tuple[Word, ...] = ()
    tasks: tuple[int, ...] = ()
    world_size: int | None = None
    bad_nodes: Mapping[str, str] = field(default_factory=dict)
    degraded_nodes: Mapping[str, str] = field(default_factory=dict)
    started: Moment | None = None
    start: AttemptStart | None = None
    updated: Moment | None = None
    stop: str | None = None
    progress: RunProgress = field(default_factory=RunProgress)
    printed: OutputFigures = field(default_factory=OutputFigures)  #: by a script; it decides nothing
    submitted: Moment | None = None
    goodput: Seconds = field(default_factory=dict)
    start_up: Seconds = field(default_factory=dict)  #: see `toolkit.metrics.start_up`
    why: str | None = None
    staging: tuple[str, ...] = ()  #: what was copied to the nodes' own disks, or why not
    ended: Moment | None = None
    supervised: bool = True
    usage: JobUsage | None = None

    @property
    def process(self) -> ProcessIdentity | None:
        """Return the process that has written the status; None if it is unknown."""
        return None if self.pid is None else ProcessIdentity(self.host or "", self.pid, self.birth)

    @property
    def is_guess(self) -> bool:
        """True if the ranks report no step, and a script has printed something: then :attr:`shown` is from that."""
        return self.progress.step is None and self.printed != OutputFigures()

    @property
    def shown(self) -> RunProgress:
        """Return the progress for readers."""
        if not self.is_guess:
            return self.progress
        figures = ("step", "total_steps", "epoch", "epochs", "loss", "eta_s")
        return self.progress.replace(**{name: getattr(self.printed, name) for name in figures})


@dataclass(frozen=True)
class RunStatus(AttemptStatus):
    """``status.json``."""

    interrupted: AttemptStatus | None = None  #: of an attempt that was never closed, see `RunDir.interrupted_status`


# ------------------------------------------------------------------------------------------------------ attempts.jsonl


@dataclass(frozen=True)
class FirstFailure(JsonRecord):
    """The failure that ended an attempt."""

    rank: int | None
    host: str
    how: str
    where: str | None = None  #: ``train.py:42 in forward``, of an exception


@dataclass(frozen=True)
class AttemptRecord(FileRecord):
    """A line of ``attempts.jsonl``: a closed attempt. Times in seconds since the epoch."""

    attempt: int
    nodes: Hosts
    started: Time
    ended: Time
    cause: str  #: see `toolkit.run.attempt.verdict`, as for the decision; a newer version may have others
    decision: str
    job_id: str | None = None
    restart_count: int | None = None
    world_size: int | None = None
    stop_asked: Time | None = None
    step_start: int | None = None
    step_end: int | None = None
    step_saved: int | None = None  #: the newest checkpoint at its end
    gained_s: float = 0.0
    lost_nodes: tuple[str, ...] = ()
    suspect: str | None = None
    vacated_nodes: tuple[str, ...] = ()
    first_failure: FirstFailure | None = None
    line: str | None = None
    slow_nodes: tuple[Straggler, ...] = ()
    submitted: Time | None = None
    goodput: Seconds = field(default_factory=dict)
    start_up: Seconds = field(default_factory=dict)  #: see `toolkit.metrics.start_up`
    code: int = 1  #: the number of the copy of the sources, see `toolkit resume --code`

    @property
    def begun(self) -> float:
        """Return when its job was submitted. If that is unknown return when it started."""
        return self.submitted or self.started


# --------------------------------------------------------------------------------------------------------- result.json

_ENDS = tuple(state for state in RunState if state.is_over)


@dataclass(frozen=True)
class RunResult(FileRecord):
    """``result.json``: how the run ended."""

    state: Annotated[RunState, replace(one_of(*_ENDS), load=RunState, dump=str)]
    attempts: int = 0
    step: int | None = None
    epoch: int | None = None
    samples: int | None = None
    metrics: Metrics = field(default_factory=dict)
    wall_s: float | None = None
    goodput: Seconds = field(default_factory=dict)
    efficiency: Efficiency | None = None
    why: str | None = None


# ----------------------------------------------------------------------------------------- owner.json, submission.json

Executor: TypeAlias = Annotated[str, one_of("slurm", "local", "debug")]


@dataclass(frozen=True)
class OwnerRecord(FileRecord):
    """``owner.json``: the owner of a run. ``jobs`` are those that have served this submission, the present one last.

    The executor ``debug`` is a rank 0 without a supervisor.
    """

    number: int
    token: str
    executor: Executor
    host: str
    pid: int
    time: Moment
    jobs: tuple[Word, ...] = ()
    follow_ups: tuple[Word, ...] = ()
    birth: str = ""  #: of the process, see `toolkit.base.procfs`
    serves: bool = False  #: whether the process is the supervisor or rank 0, and not the one that submits the run
    cluster: str = ""  #: whose numbers the jobs have, as those below see `toolkit.run.records.submitted_run`
    path: str = ""  #: of the run folder, when the owner took the run
    command: str | None = None  #: the batch script of the present job, if it is not one of the toolkit's

    @property
    def process(self) -> ProcessIdentity:
        """Return the process that owns the run."""
        return ProcessIdentity(self.host, self.pid, self.birth)

    @property
    def job_id(self) -> str | None:
        """Return the job that serves the run, or served it last. None before the first start, and without Slurm."""
        return self.jobs[-1] if self.jobs else None


@dataclass(frozen=True)
class Submission(FileRecord):
    """``submission.json``: how the run was last submitted."""

    executor: Executor
    job_id: Word
    follow_ups: tuple[Word, ...] = ()
    host: str | None = None
    time: Moment | None = None
    token: str | None = None
    took_s: float | None = None  #: up to the job's id
    cluster: str = ""  #: whose numbers the jobs have
    birth: str = ""  #: of the process whose id is ``job_id``, without Slurm; see `toolkit.base.procfs`

    @property
    def process(self) -> ProcessIdentity | None:
        """Return the process that carries the run without Slurm."""
        if self.executor != "local" or not self.job_id.isdecimal():
            return None
        return ProcessIdentity(self.host or "", int(self.job_id), self.birth)


# ---------------------------------------------------------------------------------------------------------- after.json


@dataclass(frozen=True)
class DependencyRecord(FileRecord):
    """``after.json``: what must have completed before the run starts. It is removed when that is so."""

    runs: tuple[str, ...]  #: their folders
    sweeps: tuple[str, ...]  #: their folders

    def names(self) -> list[str]:
        """Return the names of what is waited for: ``run NAME/ID``, ``sweep NAME``."""
        runs = (f"run {path.parent.name}/{path.name}" for path in map(Path, self.runs))
        return [*runs, *(f"sweep {Path(path).name}" for path in self.sweeps)]


def dependency_sentence(names: Sequence[str]) -> str:
    """Return what :meth:`AfterRecord.names` tells as a sentence; empty if it names nothing."""
    verb = "has" if len(names) == 1 else "have"
    return f"waits until {' and '.join(names)} {verb} completed" if names else ""


# ---------------------------------------------------------------------------------------------------------- point.json


@dataclass(frozen=True)
class SweepPoint(FileRecord):
    """``point.json``: the sweep that a run belongs to, and its point there."""

    sweep: str
    id: str
    values: Mapping[str, Any] = field(default_factory=dict)  #: of the swept keys
    metric: str | None = None  #: by which runs are compared, as in ``checkpoint.keep_best``
