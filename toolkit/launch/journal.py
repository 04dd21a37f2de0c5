"""Everything that the supervisor writes about a run: its status, a line for each attempt, its result."""

from __future__ import annotations

import os
import socket
import time
from datetime import UTC, datetime
from typing import Any

from toolkit import logs
from toolkit.launch.allocation import Allocation
from toolkit.launch.attempt import Attempt
from toolkit.launch.ending import Cause, Decision, Ending, Past
from toolkit.launch.nodes import Nodes
from toolkit.rundir import RunDir

log = logs.get(__name__)


class Journal:
    """One run's, kept by the one job that supervises it."""

    def __init__(self, run: RunDir, allocation: Allocation, nodes: Nodes) -> None:
        self._run = run
        self._allocation = allocation
        self._nodes = nodes
        self._unwritten: OSError | None = None

    def next_number(self) -> int:
        return max((line["attempt"] for line in self._run.attempts()), default=0) + 1

    def history(self) -> list[Past]:
        """The attempts since the run was last started by a person: whoever resumes it has mended something."""
        history: list[Past] = []
        for line in self._run.attempts():
            history.append(Past(line["cause"], line["decision"], line["step_end"], line.get("suspect")))
            if line["decision"] in (Decision.GIVE_UP, Decision.FINISH):
                history.clear()
        return history

    def add(self, attempt: Attempt, verdict: Ending) -> None:
        first, slow = verdict.first_failure, attempt.progress.get("stragglers")
        self._run.add_attempt(
            {
                "attempt": attempt.number,
                "job_id": self._allocation.job_id,
                "restart_count": self._allocation.restart_count,
                "nodes": list(attempt.plan.hosts),
                "world_size": attempt.plan.world_size,
                "started": _iso(attempt.started),
                "stop_asked": attempt.stop_asked and _iso(attempt.stop_asked),
                "ended": _iso(attempt.ended),
                "cause": verdict.cause,
                "decision": verdict.decision,
                "step_start": attempt.progress.get("step_start"),
                "step_end": attempt.progress.get("step"),
                "lost_nodes": sorted(attempt.lost_nodes),
                "suspect": suspected(verdict),
                "first_failure": first and {"rank": first.rank, "host": first.host, "how": first.how},
                "line": verdict.line,
                **({"slow_nodes": slow} if slow else {}),
            }
        )

    def write_result(self, attempt: Attempt, state: str, why: str) -> None:
        lines = self._run.attempts()
        started = datetime.fromisoformat(lines[0]["started"]).timestamp()
        reached = {key: attempt.progress.get(key) for key in ("step", "epoch", "samples")}
        reached["metrics"] = attempt.progress.get("metrics") or {}
        result = {**reached, **(attempt.result or {})}
        wall_s = round(time.time() - started, 3)
        self._run.write_result({"state": state, "attempts": len(lines), **result, "wall_s": wall_s, "why": why})

    def set_status(self, state: str, attempt: Attempt, **more: Any) -> None:
        status = {
            "state": state,
            "run": f"{self._run.name}/{self._run.id}",
            "job_id": self._allocation.job_id,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "attempt": attempt.number,
            "nodes": list(attempt.plan.hosts),
            "tasks": list(attempt.plan.tasks),
            "world_size": attempt.plan.world_size,
            "bad_nodes": {host: bad.why for host, bad in self._nodes.bad.items()},
            "started": attempt.started,
            "updated": time.time(),
            "stop": attempt.stop,
            "progress": dict(attempt.progress),
            **more,
        }
        try:
            self._run.write_status(status)
        except OSError as error:  # the next one is a second away
            if self._unwritten is None:
                log.error("%s: the status cannot be written: %s", self._run.path, error)
            self._unwritten = self._unwritten or error
            return
        if self._unwritten is not None:  # said again: a log on the same disk could not take the line above
            log.warning("%s: can be written again after: %s", self._run.path, self._unwritten)
            self._unwritten = None


def suspected(verdict: Ending) -> str | None:
    """The node that may be to blame for the end: nobody knows who sent the signal, or why the rank hung."""
    first = verdict.first_failure
    if first is None or first.rank is None or verdict.cause not in (Cause.CRASHED, Cause.HANG):
        return None
    return first.host if first.by_signal or verdict.cause is Cause.HANG else None


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
