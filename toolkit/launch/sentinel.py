"""The sentinel: it waits on a second node and requeues the job when the batch host is gone.

Only for jobs with ``--no-kill``: without it Slurm itself requeues a job that loses a node; with it, a job whose batch
host dies stays RUNNING for ever with nobody in it. It goes by three things: the supervisor's status file, which changes
twice a second; whether the supervisor accepts a connection (slurmd would, too, on a batch host that has rebooted, and
it took Slurm two minutes to miss the job there); and the job's node list, which a dead node leaves when Slurm has
noticed.

The supervisor starts it as an srun step of its own, and ends that srun, with no word to the step, as soon as the
sentinel stands. A batch host that comes back just when Slurm has given it up has its processes killed, and an srun
among them would take the sentinel's step with it (seen on 24.11: the job stayed RUNNING for ever). Instead of its srun
a file says that the sentinel lives: it touches that at each look.

A SIGTERM is no order to go either: Slurm sends one at the beginning of a preemption's grace. What is over ends the
sentinel by its own state, and Slurm by SIGKILL after KillWait.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from toolkit import fsio, logs
from toolkit.cluster import hostlist
from toolkit.cluster.commands import JobRow, Slurm, SlurmCommands, Step, srun_argv, step_environment
from toolkit.cluster.network import listen, wildcard
from toolkit.cluster.reachable import answers
from toolkit.errors import SlurmError
from toolkit.launch import ending, intent, nodes, patience
from toolkit.launch.allocation import Allocation
from toolkit.launch.comeback import EXCLUDE_S, take_back, to_exclude
from toolkit.launch.intent import Intent
from toolkit.launch.srun import silence
from toolkit.launch.steps import tethered
from toolkit.rundir import RunDir

LOOK_EVERY_S = 5.0
#: A supervisor that has said nothing for so long is asked after.
SILENT_S = 20.0
#: So many looks in a row at a batch host that does not answer mean that it is gone.
LOOKS = 2
#: A sentinel that has not touched its file for so long is replaced; NFS shows a change after up to 60 s.
LOST_S = 180.0
#: One that does not stand after so long will not.
STANDS_WITHIN_S = 120.0
ASK_SLURM_EVERY_S = 30.0
#: Once we were told to end, looks come this often and each asks Slurm: KillWait may be 5 s.
LAST_LOOKS_EVERY_S = 1.0
#: The run has ended: nothing is left to watch.
OVER = ("completed", "stopped", "failed", "cancelled")

log = logs.get(__name__)


@dataclass(frozen=True)
class Watched:
    """The job start that the sentinel belongs to."""

    run: RunDir
    job_id: str
    restart_count: int
    batch_host: str
    port: int  #: the supervisor's, see Presence
    supervisor: int  #: its pid
    nodes: int  #: of the job, spare ones included


class Watch:
    """One look after the other; the clock and the network come from outside."""

    def __init__(
        self,
        watched: Watched,
        slurm: SlurmCommands,
        clock: Callable[[], float] = time.monotonic,
        answers: Callable[[str, int], bool] = answers,
    ) -> None:
        self._watched = watched
        self._slurm = slurm
        self._clock = clock
        self._answers = answers
        self._updated: float | None = None
        self._changed = clock()
        self._unanswered = 0
        self._asked_slurm = clock()
        self._is_told_to_end = False

    @property
    def pause_s(self) -> float:
        """Until the next look."""
        return LAST_LOOKS_EVERY_S if self._is_told_to_end else LOOK_EVERY_S

    def hurry(self) -> None:
        """We have been told to end: look for what may be the reason."""
        self._is_told_to_end = True

    def look(self) -> str | None:
        """Why the job must be requeued, if it must. Raises Over when there is nothing to watch any more."""
        status = self._watched.run.status()
        if status.get("state") in OVER:
            raise Over(status["state"])
        if status.get("pid", self._watched.supervisor) != self._watched.supervisor:
            raise Over("another supervisor has taken over, with a sentinel of its own")
        if status.get("updated") != self._updated:
            self._updated, self._changed, self._unanswered = status.get("updated"), self._clock(), 0
        return self._silence() or self._slurms_word()

    def _silence(self) -> str | None:
        if self._clock() - self._changed < SILENT_S:
            return None
        host = self._watched.batch_host
        self._unanswered = 0 if self._answers(host, self._watched.port) else self._unanswered + 1
        if self._unanswered < LOOKS:
            return None
        silent_s = self._clock() - self._changed
        return f"the supervisor on the batch host {host} has been silent for {silent_s:.0f} s and does not answer"

    def _slurms_word(self) -> str | None:
        if self._clock() - self._asked_slurm < ASK_SLURM_EVERY_S and not self._is_told_to_end:
            return None
        self._asked_slurm = self._clock()
        try:
            row = self._slurm.show_job(self._watched.job_id)
        except SlurmError as error:
            log.warning("Slurm does not say how the job stands: %s", error)
            return None
        if row is None or row.restarts > self._watched.restart_count:
            raise Over("the job is over")
        if has_lost(row, self._watched.batch_host):
            return f"the batch host {self._watched.batch_host} has left the job's node list"
        if row.is_over or (self._is_told_to_end and row.state != "RUNNING"):
            raise Over(f"the job is {row.state}")
        return None


def has_lost(row: JobRow, batch_host: str) -> bool:
    """Whether Slurm has given the batch host up. The job then runs on; if that host comes back at once, and says that
    the batch script was killed, 22.05 takes the job for a failed launch and ends it."""
    is_here = not row.node_list or batch_host in hostlist.expand(row.node_list)
    return not is_here and (row.state == "RUNNING" or row.reason == "JobLaunchFailure")


class Over(Exception):
    """There is nothing to watch any more."""


def stand_watch(watched: Watched, slurm: SlurmCommands) -> None:
    """Look until the job is over or has been requeued, which ends this process as well."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _TOLD)
    watch = Watch(watched, slurm)
    while True:
        with contextlib.suppress(OSError):  # a folder that is away: the supervisor has its own troubles then
            sign_of_life(watched.run).touch(fsio.FILE_MODE)
        try:
            why = watch.look()
        except Over as over:
            log.info("%s", over)
            return
        if why is not None:
            log.error("%s: requeueing job %s", why, watched.job_id)
            nodes.remember(watched.run, watched.batch_host, why)
            requeue(watched, slurm)
            return
        if signal.sigtimedwait(_TOLD, watch.pause_s) is not None:
            watch.hurry()


_TOLD = {signal.SIGTERM}


def requeue(watched: Watched, slurm: SlurmCommands) -> None:
    """Put the job back into the queue, without its batch host.

    That may just have been cut off. If it comes back and is chosen again while it still has the job of before, it
    refuses ("Duplicate jobid"), and Slurm drains the node and holds the job until somebody releases it.
    """
    look = partial(_how_it_stands, watched, slurm)
    row = patience.ask(lambda: slurm.show_job(watched.job_id), "Slurm does not say how the job stands")
    if row is not None and not row.can_requeue:
        _hand_over(look, watched, slurm)
        return
    like_our_job = {**os.environ, "SLURM_JOB_NUM_NODES": str(watched.nodes)}
    for of_our_step in ("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_CPUS_PER_TASK"):
        like_our_job.pop(of_our_step, None)
    bad = nodes.remembered(watched.run)
    excluded = row and to_exclude(watched.run, row, slurm, bad, like_our_job)
    seen = take_back(look, slurm, watched.job_id)
    if seen is not ending.Slurm.REQUEUED:
        log.info("job %s is %s: leaving it so", watched.job_id, seen)
    elif excluded:
        patience.ask(lambda: slurm.exclude_nodes(watched.job_id, excluded), "they cannot be excluded", EXCLUDE_S)


def _hand_over(look: Callable[[], ending.Slurm], watched: Watched, slurm: SlurmCommands) -> None:
    """End a job that Slurm will not requeue: it would run on with nobody in it, and its follow-up job wait for it.

    The status tells the follow-up job that it is needed, for Slurm calls the end a cancellation.
    """
    if patience.ask(look, "Slurm does not say how the job stands") is ending.Slurm.CANCELLED:
        log.info("job %s has been cancelled: leaving it so", watched.job_id)
        return
    why = f"the batch host {watched.batch_host} is gone"
    told = {**watched.run.status(), "state": "requeued", "why": why, "updated": time.time()}
    patience.persist(lambda: watched.run.write_status(told), watched.run.path)
    patience.ask(lambda: slurm.cancel(watched.job_id), "the job cannot be ended")


def _how_it_stands(watched: Watched, slurm: SlurmCommands) -> ending.Slurm:
    """Slurm's end of a job whose batch host came back too late looks like a cancellation, and is none."""
    if intent.asked(watched.run) is Intent.CANCEL:
        return ending.Slurm.CANCELLED
    row = slurm.show_job(watched.job_id)
    seen = ending.how_slurm_sees_it(row, watched.restart_count)
    is_lost = row is not None and has_lost(row, watched.batch_host)
    return ending.Slurm.NODE_FAILED if is_lost and seen is ending.Slurm.CANCELLED else seen


def sign_of_life(run: RunDir) -> Path:
    """Touched by a sentinel at each look."""
    return run.logs / "sentinel.alive"


class Presence:
    """A port that accepts connections for as long as this process lives."""

    def __init__(self) -> None:
        self._socket = listen(wildcard())
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            with contextlib.suppress(OSError):  # whoever asked has gone
                self._socket.accept()[0].close()


class Sentinel:
    """The supervisor's side: a sentinel on some node that is not the batch host, for as long as there is one."""

    def __init__(self, run: RunDir, allocation: Allocation, environ: Mapping[str, str]) -> None:
        self._run = run
        self._allocation = allocation
        self._environ = environ
        self._port = Presence().port
        self._process: subprocess.Popen[str] | None = None
        self._is_abandoned = False

    def abandon(self) -> None:
        """Let go of it without a word, and of an srun that still starts it: that would end the step of this number in
        the job's next start, too."""
        self._is_abandoned = True
        if self._process is not None:
            silence(self._process)

    def post(self) -> None:
        """Send it there; returns at once."""
        threading.Thread(target=self._keep, daemon=True).start()

    def _keep(self) -> None:
        """Spares first, for they have nothing else to do."""
        for host in reversed(self._allocation.hosts[1:]):
            if self._is_abandoned:
                return
            words = self._send(host)
            if words is None:
                log.info("the sentinel stands on %s", host)
                self._wait_until_lost()
                words = f"no sign of life for {LOST_S:.0f} s"
            if not self._is_abandoned:
                log.warning("no sentinel on %s any more: %s", host, words)

    def _send(self, host: str) -> str | None:
        """Start it, and end its srun when it stands; else what srun said."""
        sign = sign_of_life(self._run)
        sign.unlink(missing_ok=True)
        self._process = srun = subprocess.Popen(
            self._argv(host),
            env=self._step_environ(host),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        deadline = time.monotonic() + STANDS_WITHIN_S
        while srun.poll() is None and not sign.exists() and time.monotonic() < deadline:
            time.sleep(0.2)
        stands = sign.exists()
        silence(srun)
        _, words = srun.communicate()
        return None if stands else words.strip() or f"srun ended with {srun.returncode}"

    def _wait_until_lost(self) -> None:
        seen: float | None = None
        since = time.monotonic()
        while not self._is_abandoned and time.monotonic() - since < LOST_S:
            with contextlib.suppress(OSError):
                touched = sign_of_life(self._run).stat().st_mtime
                if touched != seen:
                    seen, since = touched, time.monotonic()
            time.sleep(LOOK_EVERY_S)

    def _argv(self, host: str) -> list[str]:
        job = self._allocation
        command = [sys.executable, "-P", "-m", "toolkit.launch.sentinel", str(self._run.path), str(job.job_id)]
        command += [str(job.restart_count), job.hosts[0], str(self._port), str(os.getpid()), str(len(job.hosts))]
        step = Step(
            command=command,
            hosts=[host],
            cpus_per_task=1,
            output=str(self._run.logs / "sentinel.log"),
            name=f"{self._run.id}.sentinel",
            overlap=True,
        )
        return tethered(srun_argv(step), signal.SIGTERM)  # the thread that starts it waits for it, as a tether must

    def _step_environ(self, host: str) -> dict[str, str]:
        path = self._run.logs / "sentinel.hostfile"
        fsio.write_atomic(path, f"{host}\n", durable=False)
        return {**step_environment(self._environ), "SLURM_HOSTFILE": str(path)}


def main() -> None:
    """``python -m toolkit.launch.sentinel RUN_DIR JOB_ID RESTART_COUNT BATCH_HOST PORT SUPERVISOR NODES``"""
    run_dir, job_id, restart_count, batch_host, *numbers = sys.argv[1:]
    _write_own_log(RunDir(Path(run_dir)))
    logs.setup("sentinel")
    stand_watch(Watched(RunDir(Path(run_dir)), job_id, int(restart_count), batch_host, *map(int, numbers)), Slurm())


def _write_own_log(run: RunDir) -> None:
    """What goes through srun is lost with it."""
    fd = fsio.open_private(run.logs / "sentinel.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(fd, sys.stdout.fileno())
    os.dup2(fd, sys.stderr.fileno())


if __name__ == "__main__":
    main()
