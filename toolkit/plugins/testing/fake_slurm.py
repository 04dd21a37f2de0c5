"""An in-memory Slurm for tests, with a clock that the test sets.

It has the protocol of `toolkit.slurm.commands.Slurm`, and schedules and runs nothing. A job stays pending until the
test calls `FakeSlurm.start`, and time stands still until it calls `FakeSlurm.advance`. What follows from that (time
limits, the end of a preemption's grace time, the delay of a requeue, COMPLETING before the end, refusals) is as on a
real Slurm with its default settings::

    slurm = FakeSlurm()
    job = slurm.sbatch(["--time=10", "job.sh"])
    slurm.start(job)
    slurm.preempt(job, grace_s=60)
    slurm.advance(61)
    assert slurm.show_job(job).restarts == 1
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from toolkit.base import hostlist
from toolkit.base.durations import parse_slurms
from toolkit.base.errors import SlurmError, SlurmRefusedError
from toolkit.slurm.commands import Settings
from toolkit.slurm.jobs import JobGpus, JobRow, JobStatus, current_row
from toolkit.slurm.states import Phase, phase

#: Seconds for which a requeued job may not start: ``cred_expire`` + 1.
REQUEUE_DELAY_S = 121.0


@dataclass(frozen=True)
class CancelCall:
    """A call of `FakeSlurm.cancel`: a signal, or the end of the job with ``signal=None``."""

    job_id: str
    signal: str | None = None
    step: str | None = None
    batch: bool = False


class FakeSlurm:
    """The fake. ``sent``, ``submitted``, ``excluded``, ``depends`` and ``kept`` record calls."""

    def __init__(self, now: float = 1_800_000_000.0, accounting: bool = True, preempt_mode: str = "REQUEUE") -> None:
        self.now = now
        self.is_up = True  #: False: no controller answers
        self.accounting = accounting
        self.preempt_mode = preempt_mode  #: "REQUEUE" or "CANCEL"
        self.allows_expedite = False
        self.max_array_size = 1001
        self.refuses_submissions = ""  #: what sbatch says instead of taking a job, such as a limit's name
        self.nodes_to_spare = 100  #: a job that excludes more could never start
        self.sent: list[CancelCall] = []
        self.submitted: dict[str, list[str]] = {}
        self.excluded: dict[str, str] = {}
        self.depends: dict[str, tuple[str, ...]] = {}  #: by pending job, the jobs given to `depend`
        self.gpus = JobGpus({})  #: of any job
        self.switches = ""  #: what `scontrol show topology` prints
        self.drains: dict[str, str] = {}  #: the drained nodes, with the reasons
        self.asked_for_nodes: list[str] = []  #: the node list of each call of `drained`
        self.asked_for_jobs: list[tuple[str, ...]] = []  #: each call of `user_jobs`, as (), and of `accounted_jobs`
        self.kept: dict[str, str] = {}  #: by job, the node list that it kept when it gave nodes back
        self._jobs: dict[str, JobRow] = {}
        self._accounted: dict[str, JobRow] = {}
        self._may_start: dict[str, float] = {}
        self._final: dict[str, str] = {}
        self._steps: dict[str, list[str]] = {}

    # ------------------------------------------------------------------------------------- as Slurm's programs

    def available(self) -> bool:
        return self.is_up

    def gpus_of(self, job_id: str) -> JobGpus:
        self._contact()
        return self.gpus

    def show_job(self, job_id: str) -> JobRow | None:
        self._contact()
        return next(iter(self._find(job_id)), None)

    def show_jobs(self, job_ids: Iterable[str]) -> dict[str, JobStatus | None]:
        self._contact()
        found: dict[str, JobStatus | None] = {}
        for job_id in job_ids:
            # Accounting's rows stand behind the controller's.
            gone = [row for row in self._accounted.values() if job_id in (row.requeue_id, row.job_id, row.array_job_id)]
            row = current_row(self._find(job_id) + (gone if self.accounting else []))
            found[job_id] = None if row is None else _accounted(row) if row in gone else _status_of(row)
        return found

    def user_jobs(self) -> list[JobStatus]:
        self.asked_for_jobs.append(())
        self._contact()
        return [_status_of(row) for row in self._jobs.values()]

    def accounted_jobs(self, job_ids: Sequence[str]) -> list[JobStatus]:
        self.asked_for_jobs.append(tuple(job_ids))
        rows = self._accounted.values() if self.accounting and self.is_up else ()
        return [_accounted(row) for row in rows if {row.job_id, row.requeue_id, row.array_job_id} & {*job_ids}]

    def cancel(self, job_id: str, *, signal: str | None = None, step: str | None = None, batch: bool = False) -> None:
        self._contact()
        self.sent.append(CancelCall(job_id, signal, step, batch))
        # A signal to an unknown job is an error; to end an unknown job is none.
        if signal is not None:
            self._known(job_id)
        elif step is None:
            for row in self._find(job_id):
                self._cancel(row)

    def job_of_script(self, path: str) -> str | None:
        self._contact()
        rows = (row for row in self._jobs.values() if row.command == path)
        return next((row.array_job_id or row.job_id for row in rows), None)

    def cancel_waiting(self, job_ids: Sequence[str]) -> None:
        self._contact()
        for row in [row for job_id in job_ids for row in self._find(job_id)]:
            if phase(row.state) is Phase.PENDING:
                self._cancel(row)

    def find_step(self, job_id: str, name: str) -> str | None:
        self._contact()
        names = self._steps.get(self._one(job_id).job_id, [])
        return str(names.index(name)) if name in names else None

    def requeue(self, job_id: str, *, if_running: bool = False) -> None:
        self._contact()
        for row in self._known(job_id):
            # Like scontrol's ``Incomplete``: only a running job goes back into the queue.
            if if_running and row.state != "RUNNING":
                continue
            if not row.can_requeue:
                raise SlurmError(f"Requested operation is presently disabled for job {job_id}")
            if phase(row.state) is not Phase.PENDING:
                self._put_back(row)

    def forbid_requeue(self, job_id: str) -> None:
        self._contact()
        for row in self._known(job_id):
            self._set(row, can_requeue=False)

    def expedites(self) -> bool:
        self._contact()
        return self.allows_expedite

    def exclude_nodes(self, job_id: str, node_list: str) -> None:
        self._contact()
        for row in self._known(job_id):
            if phase(row.state) is not Phase.PENDING:
                raise SlurmError(f"Job is no longer pending execution: {job_id}")
            self.excluded[row.requeue_id] = node_list
            self._set(row, excluded=node_list)

    def depend(self, job_id: str, on: Sequence[str]) -> None:
        self._contact()
        for row in self._known(job_id):
            if phase(row.state) is not Phase.PENDING:
                raise SlurmError(f"Job is no longer pending execution: {job_id}")
            self.depends[row.requeue_id] = tuple(on)
            self._set(row, reason="Dependency")

    def drain_reasons(self, node_list: str) -> dict[str, str]:
        self.asked_for_nodes.append(node_list)
        self._contact()
        return {host: self.drains[host] for host in hostlist.expand(node_list) if host in self.drains}

    def topology(self) -> str:
        self._contact()
        return self.switches

    def release_nodes(self, job_id: str, *, keep: str) -> None:
        self._contact()
        self.kept[job_id] = keep
        self._set(self._running(job_id), node_list=keep)

    def could_run(self, arguments: Sequence[str]) -> bool:
        self._contact()
        excluded = [a.partition("=")[2] for a in arguments if a.startswith("--exclude=")]
        return sum(len(hostlist.expand(names)) for names in excluded) <= self.nodes_to_spare

    def settings(self) -> Settings:
        self._contact()
        return Settings(max_array_size=self.max_array_size)

    def preemption_cancels(self, job: JobRow, settings: Settings) -> bool:
        self._contact()
        return self.preempt_mode == "CANCEL"

    def clock(self) -> float:
        self._contact()
        return self.now

    def sbatch(self, arguments: Sequence[str]) -> str:
        self._contact()
        if self.refuses_submissions:
            raise SlurmRefusedError(f"`sbatch` failed with exit code 1:\n  {self.refuses_submissions}")
        first = len(self._jobs) + len(self._accounted) + 1
        self.submitted[str(first)] = list(arguments)
        for row in _submitted_rows(first, arguments, self.now):
            self._jobs[row.job_id] = row
        return str(first)

    # ----------------------------------------------------------------------------------- what the test decides

    def estimate_start(self, job_id: str, at: float) -> None:
        """Set when the scheduler expects the pending job to start, and why it waits."""
        self._set(self._one(job_id), start_time=at, reason="Resources")

    def start(self, job_id: str, node_list: str = "node1") -> None:
        """Start a pending job. Fails during a requeue's delay, as Slurm would."""
        row = self._one(job_id)
        assert row.state == "PENDING", f"job {job_id} is {row.state}, not PENDING"
        wait_s = self._may_start.get(row.job_id, 0.0) - self.now
        assert wait_s <= 0, f"job {job_id} was requeued and may start in {wait_s:g} s"
        end = None if row.time_limit_s is None else self.now + row.time_limit_s
        host = hostlist.expand(node_list)[0]
        self._set(
            row, state="RUNNING", reason=None, start_time=self.now, end_time=end, node_list=node_list, batch_host=host
        )

    def suspend(self, job_id: str) -> None:
        """Suspend a running job."""
        self._set(self._running(job_id), state="SUSPENDED")

    def add_step(self, job_id: str, name: str) -> str:
        """Start a step in a running job, as srun would, and return its number."""
        names = self._steps.setdefault(self._running(job_id).job_id, [])
        names.append(name)
        return str(len(names) - 1)

    def finish(self, job_id: str, exit_code: int = 0, signal: int = 0) -> None:
        """End the batch script."""
        row = self._running(job_id)
        # An expedited job that fails goes back into the queue and is held there, see `forbid_requeue`.
        if row.is_expedited and row.can_requeue and exit_code:
            self._put_back(row)
            self._set(self._one(job_id), state="REQUEUE_HOLD", reason="JobHeldUser", exit_code=exit_code)
            return
        state = "FAILED" if exit_code or signal else "COMPLETED"
        self._set(row, state=state, end_time=self.now, exit_code=exit_code)

    def preempt(self, job_id: str, grace_s: float = 0.0) -> None:
        """Preempt the job: the state stays RUNNING during the grace time, and EndTime becomes earlier."""
        self._set(self._running(job_id), preempt_time=self.now, end_time=self.now + grace_s)

    def fail_node(self, job_id: str) -> None:
        """Let a node die. The job is requeued, or ends with NODE_FAIL where it may not be."""
        row = self._running(job_id)
        if row.can_requeue:
            self._put_back(row)
        else:
            self._set(row, state="NODE_FAIL", end_time=self.now)

    def forget(self, job_id: str) -> None:
        """Drop a finished job from the controller (MinJobAge). Accounting, if it is on, keeps it."""
        for row in self._known(job_id):
            assert row.is_over, f"job {job_id} is {row.state}: a controller forgets finished jobs only"
            self._accounted[row.job_id] = self._jobs[row.job_id]
        self._jobs = {key: row for key, row in self._jobs.items() if key not in self._accounted}

    def advance(self, seconds: float) -> None:
        """Advance the clock, and end the jobs whose time is up."""
        self.now += seconds
        for row in list(self._jobs.values()):
            if row.state == "COMPLETING":
                self._set(row, state=self._final.pop(row.job_id))
            elif row.state == "RUNNING" and row.end_time is not None and row.end_time <= self.now:
                if row.preempt_time is None:
                    self._complete(row, "TIMEOUT")
                elif self.preempt_mode == "REQUEUE" and row.can_requeue:
                    self._put_back(row)
                else:  # PreemptTime and EndTime are equal then: unlike after a scancel during the grace
                    self._complete(replace(row, preempt_time=self.now), "PREEMPTED")

    # -------------------------------------------------------------------------------------------------- inside

    def _contact(self) -> None:
        if not self.is_up:
            raise SlurmError("Unable to contact slurm controller (connect failure)")

    def _find(self, job_id: str) -> list[JobRow]:
        rows = self._jobs.values()
        named = [row for row in rows if row.requeue_id == job_id]
        return named or [row for row in rows if job_id in (row.job_id, row.array_job_id)]

    def _known(self, job_id: str) -> list[JobRow]:
        rows = self._find(job_id)
        if not rows:
            raise SlurmError(f"Invalid job id specified: {job_id}")
        return rows

    def _one(self, job_id: str) -> JobRow:
        (row,) = self._known(job_id)
        return row

    def _running(self, job_id: str) -> JobRow:
        row = self._one(job_id)
        assert row.state == "RUNNING", f"job {job_id} is {row.state}, not RUNNING"
        return row

    def _set(self, row: JobRow, **changes: Any) -> None:
        self._jobs[row.job_id] = replace(row, **changes)

    def _cancel(self, row: JobRow) -> None:
        if phase(row.state) is Phase.PENDING or row.state == "SUSPENDED":  # its processes get no signal
            self._set(row, state="CANCELLED", end_time=self.now)
        elif row.state == "RUNNING":
            self._complete(row, "CANCELLED")

    def _complete(self, row: JobRow, final: str) -> None:
        """End with COMPLETING first, which is not the end: the nodes are being cleaned."""
        self._final[row.job_id] = final
        self._steps.pop(row.job_id, None)
        self._set(row, state="COMPLETING", end_time=self.now)

    def _put_back(self, row: JobRow) -> None:
        self._final.pop(row.job_id, None)
        self._steps.pop(row.job_id, None)
        self._may_start[row.job_id] = self.now + (0.0 if row.is_expedited else REQUEUE_DELAY_S)
        # A requeued job has no nodes and no times; its restarts are counted.
        nothing = {"start_time": None, "end_time": None, "preempt_time": None, "batch_host": None, "node_list": ""}
        self._set(row, state="PENDING", reason="BeginTime", restarts=row.restarts + 1, **nothing)


def _status_of(row: JobRow) -> JobStatus:
    # Slurm knows the whole path of a script, this fake only what it was given.
    command = row.command if row.command and row.command.startswith("/") else None
    return JobStatus(row.requeue_id, row.state, row.reason, row.node_list, row.start_time, command)


def _accounted(row: JobRow) -> JobStatus:
    return JobStatus(row.requeue_id, row.state, node_list=row.node_list, exit_code=row.exit_code)


_SHOWN = ("--constraint", "--exclude", "--nodelist", "--licenses", "--gres")


def _submitted_rows(first: int, arguments: Sequence[str], now: float) -> list[JobRow]:
    """Return the job of an sbatch call, or the elements of its array. The first id is ``first``."""
    options = {name: value for name, _, value in (argument.partition("=") for argument in arguments)}
    array = options.get("--array", "").partition("%")[0]
    # A job without an array is one element without an index; ``0-3,7%2`` has five, in Slurm's order.
    indices: list[str | None] = [*hostlist.expand(f"[{array}]")] if array else [None]
    return [
        JobRow(
            job_id=str(first + offset),
            state="PENDING",
            reason="Dependency" if "--dependency" in options else "Priority",
            name=options.get("--job-name"),
            array_job_id=str(first) if index is not None else None,
            array_task_id=index,
            can_requeue="--no-requeue" not in options,
            is_expedited=options.get("--requeue") == "expedite",
            command=arguments[-1],
            submit_time=now,
            time_limit_s=parse_slurms(options.get("--time")),
            options=tuple(f"{name}={options[name]}" for name in _SHOWN if name in options),
        )
        for offset, index in enumerate(indices)
    ]
