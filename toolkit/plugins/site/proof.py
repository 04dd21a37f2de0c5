"""`toolkit doctor --prove`: tries out by a short run what a site's settings only promise.

The run is like any other: submitted, supervised, stopped by a signal, brought back, resumed. Its ranks measure the
network and the shared folder, and a job that one of them submits tries the rest (proof_rank.py).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from toolkit.base import logs
from toolkit.base.durations import in_units
from toolkit.base.errors import SlurmError, ToolkitError
from toolkit.base.process_limits import limits
from toolkit.config import JobConfig
from toolkit.plugins.site.proof_rank import FOLLOWED, MEASURED, Followed, Measured, submit_follow_up
from toolkit.run.records.submitted_run import is_queued
from toolkit.run.submission.handle import Run
from toolkit.run.submission.submit import submit_script
from toolkit.slurm.commands import Slurm

NAME = "doctor"
#: A rename or a time that is seen later than this is worth a word.
LATE_S = 1.0

log = logs.get(__name__)


def prove(config: JobConfig, nodes: int, requeue_delay_s: float) -> list[Proof]:
    """Try the site out on ``nodes`` nodes; return the proofs. Raises SlurmError.

    A requeued job may restart after ``requeue_delay_s`` seconds. A run that has proven all is removed; else its folder
    is kept, and named in the log.
    """
    began = time.monotonic()
    config.name, config.cluster.nodes, config.cluster.time_min = NAME, nodes, 10
    config.cluster.tasks_per_node, config.cluster.components = max(1, config.cluster.gpus_per_node), []
    run = submit_script(config, [sys.executable, "-m", "toolkit.plugins.site.proof_rank"], "slurm")
    log.info("run %s is job %s; it waits for %d nodes; Ctrl-C ends it", run.id, run.job_id, nodes)
    log.info(
        "its way back and the job that follows it may wait in the queue for %s each", in_units(limits().proof_queued_s)
    )
    trial = _ProofRun(run, requeue_delay_s)
    # Also Ctrl-C must leave no job behind.
    try:
        trial.play()
    finally:
        trial.end()
    proofs = trial.proofs
    if all(proof.is_proven is not False for proof in proofs):
        with suppress(OSError):
            run.dir.remove()
    else:
        log.warning("the run is kept: %s; `toolkit why %s`", run.dir.path, run.id)
    log.info("the proofs took %.0f s", time.monotonic() - began)
    return proofs


@dataclass(frozen=True)
class Proof:
    """Something that a job has tried out. ``is_proven`` is None where it could not be tried."""

    name: str
    is_proven: bool | None
    text: str
    figure: float | None = None
    unit: str = ""


class _ProofRun:
    """One run, from its start to the end of the job that follows it."""

    def __init__(self, run: Run, requeue_delay_s: float) -> None:
        self.proofs: list[Proof] = []
        self._run, self._dir, self._requeue_delay_s = run, run.dir, requeue_delay_s
        self._slurm = Slurm()
        self._follower: str | None = None
        self._ask_at = time.monotonic() + limits().ask_slurm_every_s

    def play(self) -> None:
        """Play all parts. A part that fails leaves those that need it untried."""
        measured = self._measure()
        if measured is None:
            self._add("start of ranks", False, self._why())
            return
        self._follower = measured.follow_up
        self._judge_measured(measured)
        if self._stop_by_signal():
            self._come_back()
        self._follow(measured)

    def end(self) -> None:
        """Leave no job behind."""
        with suppress(ToolkitError):
            if self._dir.result() is None:
                self._run.cancel()
        if self._follower is None:  # the command may end before it has read what rank 0 has submitted
            measured = Measured.read_or_none(self._dir.path / MEASURED)
            self._follower = None if measured is None else measured.follow_up
        if self._follower is not None and not (self._dir.path / FOLLOWED).exists():
            with suppress(SlurmError):
                self._slurm.cancel(self._follower)

    # --------------------------------------------------------------------------------------------------- the parts

    def _measure(self) -> Measured | None:
        """Wait for the figures of the ranks; None if the run ends without."""
        self._await(lambda: self._dir.status().attempt is not None or self._is_over(), None)
        path = self._dir.path / MEASURED
        self._await(lambda: path.exists() or self._is_over(), limits().proof_measured_s)
        return Measured.read_or_none(path)

    def _judge_measured(self, measured: Measured) -> None:
        nodes = len({*measured.hosts})
        self._add("start of ranks", True, f"{len(measured.hosts)} ranks on {nodes} nodes")
        names = ", ".join(sorted({*measured.interfaces}))
        self._add("interface", True, f"{names}; backend {measured.backend}")
        folder = measured.folder
        if nodes < 2:
            self._add("all-reduce", None, "one node")
            self._add("shared folder", None, "one node sees only itself")
            return
        text = "the sum of 16 MiB is right on all ranks" if measured.all_reduce else "a rank has got a wrong sum"
        self._add("all-reduce", measured.all_reduce, text)
        # The shared folder, as the other node saw it.
        visible, ahead = folder["visible_s"], folder["mtime_ahead_s"]
        is_soon = visible < LATE_S
        text = f"seen on the other node within {visible * 1000:.0f} ms" if is_soon else f"seen {visible:.1f} s late"
        self._add("renamed files", is_soon, text)
        torn = folder["torn"]
        text = "no read was torn" if not torn else f"{torn:.0f} reads found a file half written, or missing"
        self._add("atomic replacement", not torn, text)
        text = "hold on the other node, too" if folder["lock_held"] else "do not hold on the other node"
        self._add("file locks", bool(folder["lock_held"]), text)
        self._add("file times", abs(ahead) < LATE_S, f"{ahead:+.2f} s against a node's clock")

    def _stop_by_signal(self) -> bool:
        """Send the signal that Slurm sends before a time limit. True if the attempt has saved and ended."""
        sent = time.monotonic()
        self._slurm.cancel(self._run.job_id, signal="USR2", batch=True)
        self._await(lambda: bool(self._dir.attempts()) or self._is_over(), limits().proof_stopped_s)
        attempts = self._dir.attempts()
        has_saved = bool(attempts) and (attempts[0].step_end or 0) > 0
        took_s = time.monotonic() - sent
        text = f"USR2 received; saved and stopped in {took_s:.1f} s" if has_saved else self._why()
        self._add("signals", has_saved, text)
        return has_saved

    def _come_back(self) -> None:
        """Wait until the run has come back and ended well. A requeue or a follow-up job brings it back."""
        self._await(self._is_over, self._requeue_delay_s + limits().proof_returned_s, lambda: self._run.job_now)
        attempts = self._dir.attempts()
        if len(attempts) < 2 or not attempts[1].step_start:
            self._add("coming back", False, self._why())
            return
        is_requeued = attempts[1].job_id == attempts[0].job_id
        waited_s = max(0.0, attempts[1].started - attempts[0].ended)
        way = "requeued" if is_requeued else f"by a follow-up job (requeue is forbidden), {attempts[1].job_id}"
        self._add("coming back", True, f"{way}; started again after {waited_s:.0f} s")

    def _follow(self, measured: Measured) -> None:
        """Wait for the follow-up job. Where a node may not submit one, submit it from here."""
        text = "submitted from a node" if self._follower else f"refused: {measured.refusal.splitlines()[0]}"
        self._add("sbatch on a node", self._follower is not None, text)
        if self._follower is None:
            self._follower, _ = submit_follow_up(self._dir.path, self._run.job_id, len({*measured.hosts}))
        path = self._dir.path / FOLLOWED
        # Without a job there is nothing to wait for.
        self._await(path.exists, limits().proof_returned_s if self._follower else 0.0, lambda: self._follower)
        followed = Followed.read_or_none(path)
        if followed is None:
            self._add("follow-up job", False, f"job {self._follower} was not seen")
            self._add("srun after a loss", None, "without a follow-up job")
            return
        self._add("follow-up job", True, "started after the run")
        if followed.shrunk_s is None:
            why = followed.why.partition("\n")[0]
            # On one node no loss could be tried: that is no failure.
            self._add("srun after a loss", False if followed.nodes > 1 else None, why)
            return
        self._add("srun after a loss", True, f"a step ran on the node that is left after {followed.shrunk_s:.1f} s")

    # --------------------------------------------------------------------------------------------------------- inside

    def _add(self, name: str, is_proven: bool | None, text: str) -> None:
        self.proofs.append(Proof(name, is_proven, text))

    def _is_over(self) -> bool:
        """True if the run has a result, or no job any more. Slurm is asked rarely."""
        now = time.monotonic()
        if now >= self._ask_at and self._dir.result() is None:
            self._ask_at = now + limits().ask_slurm_every_s
            return self._run.is_over()
        return self._dir.result() is not None

    def _why(self) -> str:
        result = self._dir.result()
        return "not within the time" if result is None else f"the run {result.state}: {result.why}"

    def _await(
        self, is_true: Callable[[], bool], limit_s: float | None, job: Callable[[], str | None] = lambda: None
    ) -> None:
        """Wait until the condition is true, for ``limit_s`` at most.

        The time that ``job`` waits in the queue does not count. Reading the folder makes NFS look for new files.
        """
        began = ask_at = time.monotonic()
        deadline = None if limit_s is None else began + limit_s
        while not is_true():
            now = time.monotonic()
            if limit_s is not None and ask_at <= now < began + limits().proof_queued_s:
                ask_at, job_id = now + limits().ask_slurm_every_s, job()
                # Time in the queue does not count. A job that is held there would wait for ever.
                with suppress(SlurmError):
                    status = self._slurm.show_jobs([job_id])[job_id] if job_id else None
                    if status and is_queued(status) and not (status.reason or "").startswith("JobHeld"):
                        deadline = now + limit_s
            if deadline is not None and now >= deadline:
                return
            with suppress(OSError):
                list(self._dir.path.iterdir())
            time.sleep(limits().look_at_proof_every_s)
