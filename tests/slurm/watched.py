"""One run of a random schedule: actions on it, observations of it, and invariants."""

import json
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.box import BoxError
from tests.slurm.site import Site
from toolkit.files import rundir
from toolkit.files.rundir import RunDir

#: A run about which nothing has changed for so long is stuck. Longer than every patience of the toolkit and of Slurm.
STUCK_S = 420
#: A requeued job starts again after 6 s here: a run without a job that long has been at rest.
REST_S = 15


def say(text: str) -> None:
    print(f"{datetime.now():%H:%M:%S} {text}", flush=True)


class Violation(AssertionError):
    """One of the invariants does not hold."""


class Cluster:
    """The box that all schedules share, with at most one cluster fault at a time."""

    def __init__(self, site: Site, disk: Path) -> None:
        self.site = site
        self.disk = disk
        self.fault = threading.Lock()
        self.jobs: Mapping[str, list[tuple[str, str]]] = {}
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def close(self) -> None:
        self._stopping.set()
        self._watcher.join()

    def _watch(self) -> None:
        """Note all jobs by name. Keep the last answer while the controller is away."""
        while not self._stopping.wait(1.0):
            with suppress(BoxError, subprocess.TimeoutExpired):
                jobs: dict[str, list[tuple[str, str]]] = {}
                for line in self.site.box.run(["squeue", "--noheader", "--format=%A %j %T"]).stdout.splitlines():
                    job_id, name, state = line.split()
                    jobs.setdefault(name, []).append((job_id, state))
                self.jobs = jobs
                self._administrate()

    def _administrate(self) -> None:
        """Act as an administrator: resume nodes that are back, and release jobs that they refused."""
        box = self.site.box
        if self.fault.acquire(blocking=False):
            try:
                away = box.run(["sinfo", "--noheader", "--states=down,drain", "--format=%N"]).stdout.split()
                if away:
                    box.run(["scontrol", "update", f"nodename={','.join(away)}", "state=resume"], check=False)
            finally:
                self.fault.release()
        for line in box.run(["squeue", "--noheader", "--format=%A %T %r"]).stdout.splitlines():
            job, state, reason = line.split(maxsplit=2)
            if state == "REQUEUE_HOLD" or (state == "PENDING" and "held" in reason.lower()):
                box.run(["scontrol", "release", job], check=False)


@dataclass
class Watched:
    """One run: what has been done to it, and what has been seen of it."""

    cluster: Cluster
    name: str
    dice: random.Random
    traces: Path
    is_exec: bool = False
    ended: bool = False  #: somebody has ended it, and nobody has resumed it since
    actions: list[str] = field(default_factory=list)  #: done while it had not completed
    log: list[str] = field(default_factory=list)
    output: str = ""  #: of the last command
    writers: list[tuple[Any, ...]] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    violations: list[str] = field(default_factory=list)

    # ------------------------------------------------------------------------------------------------- observation

    @cached_property
    def run(self) -> RunDir:
        return rundir.find(self.name, self.cluster.site.runs)

    @property
    def jobs(self) -> list[tuple[str, str]]:
        return self.cluster.jobs.get(self.name, [])

    def nodes(self) -> list[str | None]:
        status = self.run.status()
        return [*status.nodes, status.host]

    def trace(self) -> list[list[str]]:
        path = self.traces / self.name
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def note(self, text: str) -> None:
        self.log.append(f"{datetime.now():%H:%M:%S.%f} {text}")

    def observe(self) -> None:
        """Until told otherwise: who writes, and how many jobs run."""
        while not self._stop.wait(0.2):
            running = [job for job, state in self.jobs if state == "RUNNING"]
            if len(running) > 1:
                self._violated(f"two jobs of one run are running: {running}")
            with suppress(Exception):
                status = self.run.status()
                writer = (status.job_id, status.host, status.pid)
                if None in writer:  # written by a submission, or out of reach
                    continue
                if writer not in self.writers:
                    self.writers.append(writer)
                elif writer != self.writers[-1]:
                    self._violated(f"{writer} writes again after {self.writers[-1]} has: {self.writers}")

    def _violated(self, text: str) -> None:
        if text not in self.violations:
            self.note(f"VIOLATION: {text}")
            self.violations.append(text)

    def check_trace(self) -> None:
        """Steps of two attempts never alternate, and each attempt's number is its own."""
        seen = 0
        for line in self.trace():
            attempt = int(line[1])
            if attempt < seen:
                raise Violation(f"attempt {attempt} makes a step after attempt {seen} has: {' '.join(line)}")
            seen = attempt
        numbers = [a.attempt for a in self.run.attempts()]
        if numbers != sorted(set(numbers)):
            raise Violation(f"attempts are numbered {numbers}")

    def signature(self) -> tuple[Any, ...]:
        status = self.run.status()
        writer = (status.state, status.attempt, status.job_id, status.pid)
        return (len(self.trace()), *writer, tuple(self.jobs), self.run.result() is None)

    def wait_until_at_rest(self) -> None:
        """No job of the run for a while, longer than a requeue takes. Raises Violation where it is stuck."""
        last, changed, free_since = None, time.monotonic(), None
        while free_since is None or time.monotonic() - free_since < REST_S:
            now = self.signature()
            if now != last:
                last, changed = now, time.monotonic()
            if time.monotonic() - changed > STUCK_S:
                raise Violation(f"nothing has changed for {STUCK_S} s: {now}")
            if self.jobs:
                free_since = None
            else:
                free_since = free_since or time.monotonic()
            time.sleep(0.5)

    # ---------------------------------------------------------------------------------------------------- commands

    def toolkit(self, command: str, *more: str) -> int:
        """A command as a person gives it; a traceback is a violation."""
        self.note(f"$ toolkit {command} {' '.join(more)}")
        argv = ["toolkit", command, self.run.id, *more]
        env = {"TOOLKIT_RUNS": str(self.cluster.site.runs)}
        box, user = self.cluster.site.box, self.cluster.site.user
        done = box.run(argv, env=env, timeout=300, check=False, user=user)
        self.note(f"  {done.returncode}: {(done.stdout + done.stderr).strip()[-700:]}")
        if "Traceback" in done.stdout + done.stderr:
            self._violated(f"traceback of `toolkit {command}`: {(done.stdout + done.stderr)[-2000:]}")
        self.output = done.stdout + done.stderr
        return done.returncode

    def end_by(self, command: str) -> None:
        """stop or cancel; said to have been done, it counts."""
        if self.toolkit(command) == 0:
            self.ended = True

    def resume(self) -> bool:
        """Whether it was taken."""
        before = self.ended
        self.ended = False  # from this moment on it may train
        taken = self.toolkit("resume") == 0
        self.ended = before and not taken
        return taken

    def twice(self, command: str) -> None:
        """The same command from two terminals at once."""
        results: list[int] = []
        before, self.ended = self.ended, False if command == "resume" else self.ended
        threads = [threading.Thread(target=lambda: results.append(self.toolkit(command))) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if command == "resume":
            self.ended = before and 0 not in results
        elif 0 in results:
            self.ended = True

    def scancel(self) -> None:
        """The job that ``toolkit status`` shows, as a person does."""
        row = self._row()
        job = row.get("job_id")
        if not job or all(job_id != str(job) for job_id, _ in self.jobs):
            return
        self.note(f"$ scancel {job} (of {self.jobs})")
        if self.cluster.site.box.run(["scancel", str(job)], check=False, user=self.cluster.site.user).returncode == 0:
            # one that ends or has ended by itself at this moment is not ended by us
            self.ended = self.run.result() is None or self.ended

    def _row(self) -> dict[str, Any]:
        self.toolkit("status", "--json")
        with suppress(ValueError, IndexError, KeyError):
            rows = json.loads(self.output[self.output.index("[") :])
            return dict(rows[0])
        return {}

    def pids(self, *words: str) -> list[int]:
        return [
            pid
            for pid, command in self.cluster.site.box.processes()
            if all(word in command for word in words) and not command.startswith(("srun", "/bin/sh", "sh "))
        ]

    def kill(self, *words: str) -> None:
        pids = self.pids(*words)
        if pids:
            pid = self.dice.choice(sorted(pids))
            self.note(f"SIGKILL to {pid} of {pids} ({words})")
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def requeue(self) -> None:
        for job, state in self.jobs:
            if state == "RUNNING":
                self.note(f"$ scontrol requeue {job}")
                self.cluster.site.box.run(["scontrol", "requeue", job], check=False)
