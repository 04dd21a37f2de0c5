"""Reports a rank's progress to its node's agent, or to files in an unsupervised run.

Work before the first step counts as progress: there a rank compiles, or chooses kernels, and reports nothing else.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from toolkit import hang
from toolkit.base import logs, procfs
from toolkit.base.errors import EXIT_FAILED
from toolkit.base.process_limits import limits
from toolkit.files.polling import PollTimer
from toolkit.files.records import SchemaError
from toolkit.files.run_files import STOPPED_PHASE, RunProgress, RunResult, RunState, RunStatus
from toolkit.files.rundir import RunDir
from toolkit.hang import Activity
from toolkit.nodes.agent.reports import MAX_BYTES, AgentGoneError, Outbox, RankReport

#: Seconds that a busy agent may take to accept the last report, and the result of the run.
LAST_WAIT_S, RESULT_WAIT_S = 3.0, 60.0

log = logs.get(__name__)


class Reporter:
    """Takes a rank's progress and its result. The base class drops them."""

    def progress(self, **fields: Any) -> None:
        """Note where the rank is; never blocks on I/O."""

    def finish(self, result: Mapping[str, Any]) -> None:
        """Hand over the result of the whole run."""

    def close(self) -> None:
        """Send what is still to be sent and stop."""


class _Latest(Reporter):
    """Keeps the newest report, which a thread publishes. So a slow store or disk never delays a step."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._fields: dict[str, Any] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="toolkit-report", daemon=True)

    def progress(self, **fields: Any) -> None:
        self._fields = {**self._fields, **fields, "time": time.time()}  # one assignment: the thread sees old or new

    def _run(self) -> None:
        failures = logs.RateLimitedWarnings(log)
        while not self._closed.wait(self._every_s):
            try:
                self._publish(self._fields)
            except Exception as error:  # the next report is a second away; a rank without reports counts as stopped
                failures.warn("a report of this rank has failed: %r", error)

    def _publish(self, fields: dict[str, Any], wait_s: float = 0.0) -> None:
        """Publish a report. The last one may take ``wait_s``, and the others no time."""
        raise AssertionError("each reporter publishes in its own way")

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        # Once more after the thread's last time, so that the newest report is sent.
        self._publish(self._fields, LAST_WAIT_S)


class AgentReporter(_Latest):
    """Reports to the agent of this node: the arrival tells a rank that waits from one that is stopped or dead.

    The rank ends when it loses the agent, since without a supervisor nothing else would end it. The agent leaves when
    it has lost the supervisor.
    """

    def __init__(self, outbox: Outbox, attempt: int, rank: int, activity: Activity) -> None:
        # The other ranks' progress is passed on once a second.
        super().__init__(limits().report_every_s if rank == 0 else 2 * limits().report_every_s)
        self._outbox, self._sending = outbox, threading.Lock()
        self._attempt, self._rank = attempt, rank
        self._activity, self._early_work = activity, StartupActivity(activity)
        self._was_truncated = False  #: True once a report was too long
        self._thread.start()

    def _publish(self, fields: dict[str, Any], wait_s: float = 0.0) -> None:
        self._early_work.look()
        report = self._report()
        self._send(replace(report, fields=fields) if self._rank == 0 else report, wait_s)

    def finish(self, result: Mapping[str, Any]) -> None:
        if self._rank == 0:
            self._send(replace(self._report(), result=dict(result)), RESULT_WAIT_S)

    def _report(self) -> RankReport:
        now = self._activity
        return RankReport(self._attempt, self._rank, now.phase, now.step, now.count)

    def _send(self, report: RankReport, wait_s: float) -> None:
        # Too long for one message: leave the metrics out.
        data = report.as_bytes()
        if len(data) > MAX_BYTES:
            if not self._was_truncated:
                self._was_truncated = True
                only = "only TensorBoard and metrics.jsonl have them"
                log.warning("there are too many metrics for `toolkit status`: %s", only)
            fields, result = ({**extra, "metrics": {}} if extra else extra for extra in (report.fields, report.result))
            data = replace(report, fields=fields, result=result).as_bytes()
        try:
            with self._sending:
                is_sent = self._outbox.send(data, wait_s)
            if not is_sent and wait_s:
                log.error("the agent of this node has not taken the last report within %.0f s", wait_s)
        except AgentGoneError:
            if self._closed.is_set():  # the attempt is over on both sides
                return
            log.error("the agent of this node is gone, and this rank is without a supervisor: it ends")
            os._exit(EXIT_FAILED)  # the main thread may hang in a collective and would never see an exception


class FileReporter(_Latest):
    """Writes ``status.json`` and ``result.json`` itself, on rank 0 of an unsupervised run."""

    def __init__(self, run: RunDir, status: RunStatus, owns_run: Callable[[], bool] = lambda: True) -> None:
        super().__init__(limits().report_every_s)
        self._run_dir, self._owns_run = run, owns_run
        self._status = status
        self._started, self._timer = time.time(), PollTimer()
        self._run_dir.clear_result()
        self._thread.start()

    def _publish(self, fields: dict[str, Any], wait_s: float = 0.0) -> None:
        if not self._closed.is_set() and not self._timer.is_due(fields.get("phase")):
            return
        if not self._owns_run():
            log.error("run %s was started again by another process, and belongs to it: this one ends", self._run_dir.id)
            os._exit(EXIT_FAILED)  # all that it writes from now on would damage the run
        # A full disk, or a figure that no file may hold; the next report is a second away.
        with contextlib.suppress(OSError, SchemaError):
            progress = RunProgress.from_json(fields)
            status = self._status.replace(state=RunState.RUNNING, updated=time.time(), progress=progress)
            self._run_dir.write_status(status)

    def finish(self, result: Mapping[str, Any]) -> None:
        wall_s = round(time.time() - self._started, 3)
        known = {"attempts": 1, **result, "wall_s": wall_s, "state": RunState.COMPLETED}
        self._run_dir.write_result(RunResult.from_json(known))
        self._status = self._status.replace(ended=time.time())

    def close(self) -> None:
        super().close()
        state = RunState.COMPLETED
        if self._status.ended is None:
            has_saved = self._fields.get("phase") == STOPPED_PHASE
            state = RunState.STOPPED if has_saved else RunState.FAILED
        with contextlib.suppress(OSError):  # a full disk must not hide how the run ended
            self._run_dir.write_status(self._run_dir.status().replace(state=state))


#: A rank that waits in gloo uses 0.002 of a core; one that compiles, or whose compilers are programs, most of one.
WORKING_SHARE = 0.05
#: The kernel counts in hundredths of a second.
LOOK_EVERY_S = 2.0
#: In the other phases a rank waits for something, which may keep a core busy: NCCL does.
COMPILES_IN = frozenset({hang.SETTING_UP, hang.PRIMING, hang.IN_STEP, hang.OWN_CODE})


class StartupActivity:
    """Moves the count of ``activity`` while the rank and its children use a CPU, until its first step has ended."""

    def __init__(
        self,
        activity: Activity,
        cpu_s: Callable[[], float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._activity, self._cpu_s, self._clock = activity, cpu_s or family_cpu_s, clock
        self._since, self._used_s = clock(), self._cpu_s()

    def look(self) -> None:
        """Compare the use of the CPU with that of the last look. To be called every second or so; it is cheap."""
        now = self._clock()
        if self._activity.step is not None or now - self._since < LOOK_EVERY_S:
            return
        used_s = self._cpu_s()
        is_working = used_s - self._used_s >= WORKING_SHARE * (now - self._since)
        if is_working and self._activity.phase in COMPILES_IN:
            self._activity.note_progress()
        self._since, self._used_s = now, used_s


def family_cpu_s(pid: int | None = None) -> float:
    """Return the time on a CPU of a process, this one by default, of its children and of theirs."""
    name = str(pid or os.getpid())
    stat = procfs.read(name)
    if stat is None:
        return 0.0
    return stat.family_cpu_s + sum(map(family_cpu_s, hang.children(name)))
