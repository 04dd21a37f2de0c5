"""The supervisor: the one process that owns a run's lifecycle, on the batch host or on this machine.

It starts an attempt (a fresh store, then the ranks), watches it without polling, judges how it ended, writes that down
and restarts, requeues or finishes. Ranks own only training. It imports no torch, so it is up in a fraction of a second.

Signal handlers only put a note into the event queue; everything is done by the one loop in :meth:`Supervisor._watch`.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from toolkit import config as configs
from toolkit import fsio, logs, rundir
from toolkit.cluster.commands import JobRow, Slurm, SlurmCommands
from toolkit.config import JobConfig
from toolkit.errors import EXIT_DONE, EXIT_FAILED, SlurmError, ToolkitError
from toolkit.launch import intent
from toolkit.launch.allocation import Allocation
from toolkit.launch.ending import Cause, Decision, Ending, Facts, RankFailure, judge
from toolkit.launch.steps import Events, Launcher, LocalLauncher, RankEnded, SrunLauncher, Step, StepEnded
from toolkit.launch.store import Report, StoreHost, StoreHostEnded
from toolkit.rundir import RunDir

#: After the first failure the others' error files and srun's lines are awaited this long: they tell the causes apart.
LAST_WORDS_S = 0.5
STATUS_EVERY_S = 1.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

log = logs.get(__name__)


@dataclass(frozen=True)
class _Signalled:
    number: signal.Signals


@dataclass
class _Attempt:
    """What is known of the attempt that runs now."""

    number: int
    started: float
    failures: list[RankFailure] = field(default_factory=list)
    reports: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    result: Mapping[str, Any] | None = None
    told: str | None = None
    kill_at: float | None = None
    exit_code: int | None = None

    @property
    def progress(self) -> Mapping[str, Any]:
        """Rank 0's latest report."""
        return self.reports.get(0, {})


class Supervisor:
    """Runs one run to its end. ``launcher`` and ``slurm`` are its two outside worlds."""

    def __init__(
        self,
        run: RunDir,
        config: JobConfig,
        allocation: Allocation,
        launcher: Launcher,
        slurm: SlurmCommands | None,
    ) -> None:
        self._run = run
        self._config = config
        self._allocation = allocation
        self._launcher = launcher
        self._slurm = slurm
        self._events: Events = SimpleQueue()
        self._status: dict[str, Any] = {}
        self._told: str | None = None

    def run(self) -> int:
        """Attempts until one finishes or no more may be made; returns the exit code of the job."""
        self._install_handlers()
        if intent.cancelled(self._run):  # while it waited in the queue, or before Slurm requeued it
            self._run.write_result({"state": "cancelled", "attempts": len(self._run.attempts()), "metrics": {}})
            return EXIT_FAILED
        self._run.clear_result()
        self._close_left_over_attempt()
        while True:
            ending = self._run_attempt()
            if ending.decision is not Decision.RESTART:
                break
        return EXIT_DONE if ending.decision in (Decision.FINISH, Decision.REQUEUE) else EXIT_FAILED

    def _install_handlers(self) -> None:
        """Replaces submitit's, which requeue from inside the handler. SimpleQueue.put may interrupt itself safely."""
        for number in SIGNALS:
            signal.signal(number, lambda n, _: self._events.put(_Signalled(signal.Signals(n))))
        signal.signal(signal.SIGCONT, signal.SIG_DFL)

    # -------------------------------------------------------------------------------------------------- one attempt

    def _run_attempt(self) -> Ending:
        attempt = _Attempt(self._next_number(), time.time(), told=self._told)
        self._set_status("starting", attempt)
        log.info("attempt %d: %d ranks on %s", attempt.number, self._allocation.world_size, self._hosts_text())
        environ = self._rank_environ(attempt)
        host = "127.0.0.1" if self._allocation.job_id is None else _wildcard()
        logs_dir = self._run.attempt_logs(attempt.number)
        store = StoreHost(self._allocation.world_size, host, environ, self._events, logs_dir / "store.log")
        try:
            environ["MASTER_PORT"] = str(store.port)
            step = self._launcher.start(attempt.number, self._rank_command(), environ, self._events)
            self._watch(attempt, step)
        finally:
            store.close()
        self._drain(attempt)
        self._read_error_files(attempt)
        ending = judge(self._facts(attempt))
        self._record(attempt, ending)
        return ending

    def _rank_command(self) -> list[str]:
        return [sys.executable, "-P", "-m", "toolkit", "run", str(self._run.config)]

    def _rank_environ(self, attempt: _Attempt) -> dict[str, str]:
        """What every rank gets; its own numbers are set where it starts."""
        environ = dict(os.environ)
        environ.update(
            {
                rundir.RUN_DIR_VARIABLE: str(self._run.path),
                "TOOLKIT_RUNS": str(self._run.path.parent.parent),
                "TOOLKIT_ATTEMPT": str(attempt.number),
                "TOOLKIT_SUPERVISED": "1",
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "PYTHONUNBUFFERED": "1",
            }
        )
        environ.setdefault("OMP_NUM_THREADS", str(self._allocation.cpus_per_task))
        return environ

    def _watch(self, attempt: _Attempt, step: Step) -> None:
        """Handle events until every rank has ended. The one place where things happen during an attempt."""
        next_status = 0.0
        while attempt.exit_code is None:
            now = time.monotonic()
            if attempt.kill_at is not None and now >= attempt.kill_at:
                attempt.kill_at = None
                step.kill()
            if now >= next_status:
                self._set_status("running" if attempt.progress else "starting", attempt)
                next_status = now + STATUS_EVERY_S
            wake = min(next_status, attempt.kill_at or next_status)
            try:
                self._handle(attempt, self._events.get(timeout=max(0.0, wake - time.monotonic())))
            except Empty:
                continue

    def _drain(self, attempt: _Attempt) -> None:
        while not self._events.empty():
            self._handle(attempt, self._events.get())

    def _handle(self, attempt: _Attempt, event: Any) -> None:
        match event:
            case Report(content):
                self._take_report(attempt, content)
            case RankEnded():
                self._take_failure(attempt, event)
            case StepEnded(exit_code):
                attempt.exit_code = exit_code
            case StoreHostEnded(exit_code):
                how = f"the store host ended with exit code {exit_code}; see store.log"
                attempt.failures.append(RankFailure(None, socket.gethostname(), how, time.time()))
                self._kill_soon(attempt)
            case _Signalled(number):
                self._take_signal(attempt, number)

    def _take_report(self, attempt: _Attempt, content: Mapping[str, Any]) -> None:
        if "result" in content:
            attempt.result = content["result"]
        elif "rank" in content:
            attempt.reports[content["rank"]] = content["report"]

    def _take_failure(self, attempt: _Attempt, ended: RankEnded) -> None:
        if attempt.told is None:
            log.error("rank %s on %s: %s", ",".join(map(str, ended.ranks)), ended.host, ended.how)
        for rank in ended.ranks:
            by_signal = ended.signal is not None and not self._killed_by_us(attempt)
            attempt.failures.append(RankFailure(rank, ended.host, ended.how, ended.time, by_signal))
        self._kill_soon(attempt)

    @staticmethod
    def _killed_by_us(attempt: _Attempt) -> bool:
        return bool(attempt.failures) and attempt.kill_at is None

    @staticmethod
    def _kill_soon(attempt: _Attempt) -> None:
        if len(attempt.failures) <= 1 or attempt.kill_at is not None:
            attempt.kill_at = attempt.kill_at or time.monotonic() + LAST_WORDS_S

    def _take_signal(self, attempt: _Attempt, number: signal.Signals) -> None:
        if number not in ENDING_SIGNALS:
            log.warning("%s: the job ends soon; what was not yet saved will be trained again", number.name)
            return
        log.warning("%s: ending the ranks", number.name)
        interactive = number is signal.SIGINT or self._allocation.job_id is None
        self._told = attempt.told = "cancel" if interactive or intent.cancelled(self._run) else "signal"
        attempt.kill_at = time.monotonic()

    # ------------------------------------------------------------------------------------------------------ judging

    def _read_error_files(self, attempt: _Attempt) -> None:
        """What failing ranks wrote about themselves: more telling than an exit code, and timed at its cause."""
        for path in sorted(self._run.attempt_logs(attempt.number).glob("error-*.json")):
            said: dict[str, Any] = fsio.read_json(path) or {}
            how = f"{said['type']}: {said['message']}"
            failure = RankFailure(said["rank"], said["host"], how, said["time"], traceback=said["traceback"])
            attempt.failures = [f for f in attempt.failures if f.rank != said["rank"] or f.by_signal] + [failure]

    def _facts(self, attempt: _Attempt) -> Facts:
        assert attempt.exit_code is not None
        well = attempt.exit_code == 0 and not attempt.failures
        return Facts(
            exit_code=attempt.exit_code,
            failures=tuple(attempt.failures),
            told=attempt.told,
            slurm=None if well else self._ask_slurm(),
            crashes_before=sum(line["cause"] == Cause.CRASHED for line in self._run.attempts()),
            max_failures=self._config.retry.max_failures,
        )

    def _ask_slurm(self) -> str | None:
        """How Slurm sees our job at this moment, or None when it cannot be asked: unknown is never "dead"."""
        if self._slurm is None or self._allocation.job_id is None:
            return None
        if intent.cancelled(self._run):
            return "cancelled"
        try:
            row = self._slurm.show_job(self._allocation.job_id)
        except SlurmError as error:
            log.warning("Slurm does not say how the job stands: %s", error)
            return None
        return how_slurm_sees_it(row)

    # ---------------------------------------------------------------------------------------------------- recording

    def _record(self, attempt: _Attempt, ending: Ending) -> None:
        log.info("attempt %d: %s (%s): %s", attempt.number, ending.cause, ending.decision, ending.line)
        self._add_attempt_line(attempt, ending)
        if ending.decision is Decision.RESTART:
            self._set_status("restarting", attempt, why=ending.line)
            return
        state = _STATES[ending.decision, ending.cause is Cause.CANCELLED]
        self._set_status(state, attempt, why=ending.line, ended=time.time())
        if ending.decision is Decision.REQUEUE:
            self._requeue()
        else:
            self._write_result(attempt, state, ending)

    def _add_attempt_line(self, attempt: _Attempt, ending: Ending) -> None:
        first = ending.first_failure
        self._run.add_attempt(
            {
                "attempt": attempt.number,
                "job_id": self._allocation.job_id,
                "restart_count": self._allocation.restart_count,
                "nodes": list(self._allocation.hosts),
                "world_size": self._allocation.world_size,
                "started": _iso(attempt.started),
                "ended": _iso(time.time()),
                "cause": ending.cause,
                "decision": ending.decision,
                "step_start": attempt.progress.get("step_start"),
                "step_end": attempt.progress.get("step"),
                "first_failure": first and {"rank": first.rank, "host": first.host, "how": first.how},
                "line": ending.line,
            }
        )

    def _write_result(self, attempt: _Attempt, state: str, ending: Ending) -> None:
        lines = self._run.attempts()
        started = datetime.fromisoformat(lines[0]["started"]).timestamp()
        reached = {key: attempt.progress.get(key) for key in ("step", "epoch", "samples")}
        reached["metrics"] = attempt.progress.get("metrics") or {}
        result = {**reached, **(attempt.result or {})}
        wall_s = round(time.time() - started, 3)
        self._run.write_result({"state": state, "attempts": len(lines), **result, "wall_s": wall_s, "why": ending.line})

    def _requeue(self) -> None:
        assert self._slurm is not None
        assert self._allocation.job_id is not None
        try:
            self._slurm.requeue(self._allocation.job_id)
        except SlurmError as error:
            log.warning("requeue: %s", error)

    def _close_left_over_attempt(self) -> None:
        """An attempt whose supervisor could not say goodbye gets its line now; a preempted one would have had TERM."""
        status = self._run.status()
        number = status.get("attempt")
        if not number or any(line["attempt"] == number for line in self._run.attempts()):
            return
        why = "its supervisor ended without a word: a node failure, a power cut, or SIGKILL"
        log.warning("attempt %d: %s", number, why)
        left = _Attempt(number, status["started"], reports={0: status.get("progress") or {}})
        self._add_attempt_line(left, Ending(Cause.NODE_FAILURE, Decision.REQUEUE, why))

    def _next_number(self) -> int:
        return max((line["attempt"] for line in self._run.attempts()), default=0) + 1

    def _set_status(self, state: str, attempt: _Attempt, **more: Any) -> None:
        self._run.write_status(
            {
                "state": state,
                "run": f"{self._run.name}/{self._run.id}",
                "job_id": self._allocation.job_id,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "attempt": attempt.number,
                "nodes": list(self._allocation.hosts),
                "world_size": self._allocation.world_size,
                "started": attempt.started,
                "updated": time.time(),
                "progress": dict(attempt.progress),
                **more,
            }
        )

    def _hosts_text(self) -> str:
        pairs = zip(self._allocation.hosts, self._allocation.tasks, strict=True)
        return ", ".join(f"{host} x{count}" for host, count in pairs)


_STATES = {
    (Decision.FINISH, False): "completed",
    (Decision.REQUEUE, False): "requeued",
    (Decision.GIVE_UP, False): "failed",
    (Decision.GIVE_UP, True): "cancelled",
}


def how_slurm_sees_it(row: JobRow | None) -> str | None:
    """preempted, timeout, cancelled or running, of a job whose ranks have just ended.

    A preempted job stays RUNNING through its grace time, with PreemptTime set. A job that is COMPLETING although
    neither preempted nor out of time was cancelled by somebody: it must never be brought back.
    """
    if row is None:
        return None
    if row.preempt_time is not None:
        return "preempted"
    if row.state == "RUNNING":
        return "running"
    return "timeout" if _used_up(row) else "cancelled"


def _used_up(row: JobRow) -> bool:
    if row.end_time is None or row.start_time is None or row.time_limit_s is None:
        return False
    return row.end_time - row.start_time >= row.time_limit_s


def _wildcard() -> str:
    return "::" if socket.has_dualstack_ipv6() else "0.0.0.0"


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


# ------------------------------------------------------------------------------------------------------------- entry


def supervise(run_dir: str, where: str) -> None:
    """Supervise the run in ``run_dir`` to its end; what both doors come down to. Exits with the job's code.

    ``where`` is ``slurm`` (inside an allocation, whose size wins over the config's and is recorded in
    ``config.yaml``) or ``local``.
    """
    run = RunDir(Path(run_dir))
    os.umask(0o077)
    logs.setup("supervisor")
    logs.add_file(run.logs / "supervisor.log")
    try:
        code = _build(run, where).run()
    except Exception as error:
        _write_own_failure(run, error)
        raise SystemExit(EXIT_FAILED) from error
    if code != EXIT_DONE:
        raise SystemExit(code)


def _build(run: RunDir, where: str) -> Supervisor:
    config = configs.load_config(run.config, site=False)
    if where == "local":
        allocation = Allocation.local(config.cluster)
        return Supervisor(run, config, allocation, LocalLauncher(run, allocation), None)
    allocation = Allocation.slurm(os.environ)
    _record_size(run, config, allocation)
    if allocation.job_key:
        rundir.remember_job(run, allocation.job_key)
    slurm = Slurm()
    return Supervisor(run, config, allocation, SrunLauncher(run, allocation, slurm), slurm)


def _record_size(run: RunDir, config: JobConfig, allocation: Allocation) -> None:
    """Write the allocation's size into the run's config."""
    configs.check_batch(config, allocation.world_size)
    cluster = config.cluster
    cluster.nodes = len(allocation.hosts)
    cluster.tasks_per_node = max(allocation.tasks)
    cluster.cpus_per_task = allocation.cpus_per_task
    fsio.write_atomic(run.config, configs.dump_config(config))


def _write_own_failure(run: RunDir, error: Exception) -> None:
    """Whoever waits for the run must learn that nobody looks after it any more."""
    log.error("the supervisor failed: %s", error, exc_info=not isinstance(error, ToolkitError))
    why = f"the supervisor failed: {type(error).__name__}: {error}"
    run.write_result({"state": "failed", "attempts": len(run.attempts()), "metrics": {}, "why": why})
    run.write_status({**run.status(), "state": "failed", "why": why, "ended": time.time()})
