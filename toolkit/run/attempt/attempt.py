"""The attempt that runs now, as the supervisor knows it.

It starts; it runs once rank 0 is heard; it is asked to stop, or its ranks are killed; it ends when all ranks have ended
or are given up. Only the methods here change it, so that each of these moves has one rule.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from toolkit.files.run_files import AttemptStart, AttemptStatus, OutputFigures, RunProgress, RunResult, RunState
from toolkit.nodes.allocation import Allocation
from toolkit.run.attempt.verdict import RankFailure, StopReason
from toolkit.run.job.nodes import BadNode


@dataclass
class Attempt:
    """One start of the ranks, on ``plan``'s nodes. Others read the fields and call the methods."""

    number: int
    started: float
    plan: Allocation
    start: AttemptStart | None = None  #: None for user scripts, which report nothing
    first_step: float | None = None  #: when the first step began, as closely as rank 0's reports tell
    interrupted: AttemptStatus | None = None  #: the status, if an earlier supervisor wrote it
    hang: RankFailure | None = None
    failures: list[RankFailure] = field(default_factory=list)
    stopped: list[RankFailure] = field(default_factory=list)  #: ranks that ended with the exit code of a stop
    gone: set[int] = field(default_factory=set)  #: ranks that have ended
    finished: set[int] = field(default_factory=set)  #: those of them that ended with exit code 0
    lost_nodes: set[str] = field(default_factory=set)
    cut_links: set[tuple[str, str]] = field(default_factory=set)  #: the first node could not connect to the second
    silent_nodes: set[str] = field(default_factory=set)  #: their agents have ended, and they may be dead
    progress: RunProgress = field(default_factory=RunProgress)  #: rank 0's latest report of the run
    printed: OutputFigures = field(default_factory=OutputFigures)  #: read from a script's output
    heard: dict[int, str] = field(default_factory=dict)  #: the ranks that have reported, with their hosts
    has_begun: bool = False  #: a script's first rank has its log; it may never report
    result: RunResult | None = None  #: as rank 0 has delivered it
    stop: StopReason | None = None
    stop_asked: float | None = None
    vacated_nodes: Mapping[str, BadNode] = field(default_factory=dict)  #: to be replaced by spares, with the reason
    kill_at: float | None = None
    killed: bool = False
    killed_after_s: float | None = None  #: how long after they were asked to stop
    exit_code: int | None = None
    ended: float = 0.0
    step_saved: int | None = None  #: the newest checkpoint at its end
    gained_s: float = 0.0  #: see `goodput.gained_s`

    @classmethod
    def of_status(cls, status: AttemptStatus, allocation: Allocation) -> Attempt:
        """Return the attempt whose supervisor has died, from the ``status`` that it wrote last."""
        assert status.attempt is not None
        plan = replace(allocation, hosts=status.nodes, tasks=status.tasks)
        started = time.time() if status.started is None else status.started
        ended = time.time() if status.updated is None else status.updated
        return cls(
            status.attempt,
            started,
            plan,
            progress=status.progress,
            printed=status.printed,
            interrupted=status,
            ended=ended,
        )

    @cached_property
    def rank_hosts(self) -> list[str]:
        """The node of each rank."""
        return self.plan.rank_hosts

    @cached_property
    def _still_running(self) -> Counter[str]:
        """The number of ranks that have not ended, by node. Nodes with none are left out."""
        return Counter(self.rank_hosts)

    def host_of(self, rank: int) -> str:
        """Return the node from which ``rank`` has reported, else the planned one. A launcher may number otherwise."""
        return self.heard.get(rank, self.rank_hosts[rank])

    # ------------------------------------------------------------------------------------------- while the ranks work

    def note_reported(self, host: str, ranks: Iterable[int]) -> None:
        self.heard |= dict.fromkeys(ranks, host)

    def note_begun(self) -> None:
        self.has_begun = True

    def note_marks(self, marks: Mapping[str, float]) -> None:
        """Note when the agents of the attempt's nodes were ready for what."""
        assert self.start is not None, "the ranks of the toolkit have a start"
        self.start = self.start.replace(marks=marks)

    def note_result(self, result: RunResult) -> None:
        self.result = result

    def note_cut_link(self, host: str, peer: str) -> None:
        """Note that ``host`` could not connect to ``peer``. Only the attempt's nodes count."""
        if peer != host and {host, peer} <= {*self.plan.hosts}:
            self.cut_links.add((host, peer))

    # --------------------------------------------------------------------------------------------- stopping and killing

    def note_stop(self, stop: StopReason) -> bool:
        """Take a reason for a stop; return whether the ranks are still to be asked.

        The first reason counts, but a user's request replaces any other, and any replaces a move.
        """
        if self.stop in (None, StopReason.MOVE):
            self.stop, self.stop_asked = stop, time.time()
            return True
        if stop in (StopReason.CANCEL, StopReason.USER):
            self.stop = stop
        return False

    def vacate(self, nodes: Mapping[str, BadNode]) -> None:
        """Note the nodes that spares are to replace, once the ranks have stopped for it."""
        self.vacated_nodes = nodes

    def kill_within(self, wait_s: float) -> None:
        """Have the ranks killed in ``wait_s`` at the latest, by time.monotonic(). Those that were are killed again."""
        if not self.killed:
            soon = time.monotonic() + wait_s
            self.kill_at = min(self.kill_at or soon, soon)

    def kill_after(self, wait_s: float) -> None:
        """Have the ranks killed in ``wait_s``, and no earlier: each of a script's ranks may be saving."""
        if not self.killed:
            self.kill_at = time.monotonic() + wait_s

    def note_pause(self, pause_s: float) -> None:
        """Give ranks that are to be killed the time back for which nothing could run."""
        if self.kill_at is not None:
            self.kill_at += pause_s

    def note_killed(self, again_at: float) -> None:
        """Note that all ranks got SIGKILL, and when those that are left are to get it again."""
        if not self.killed and self.stop_asked is not None:
            self.killed_after_s = time.time() - self.stop_asked
        self.kill_at, self.killed = again_at, True

    def end_for_hang(self, hang: RankFailure) -> None:
        """Have the ranks killed at once, since they wait for each other. ``hang`` tells for whom."""
        self.hang = hang
        self.kill_within(0.0)

    # ------------------------------------------------------------------------------------------------ how the ranks end

    def fail(self, *failures: RankFailure) -> None:
        """Note the failures of ranks, or of what they need."""
        self.failures += failures

    def replace_failures(self, failures: Iterable[RankFailure]) -> None:
        """Replace the failures by what is known of them by now."""
        self.failures = [*failures]

    def lose(self, hosts: Iterable[str]) -> None:
        """Note that nodes are lost. Nothing is heard of their ranks any more."""
        self.lost_nodes |= {*hosts}

    def note_silent(self, host: str) -> None:
        self.silent_nodes.add(host)

    def note_finished(self, ranks: Collection[int]) -> None:
        self.note_exited(ranks)
        self.finished |= set(ranks)

    def note_stopped(self, *ranks: RankFailure) -> None:
        """Note the ends of ranks that stopped. They are failures if no stop was asked for and other ranks failed."""
        self.stopped += ranks

    def explain_by_stopped(self) -> None:
        """Count the first rank that stopped among the failures, if no stop was asked for. Others waited for it."""
        if self.stop is None and self.failures:
            self.fail(*self.stopped[:1])

    def forget_stopped(self) -> None:
        """Note that whether all ranks have stopped will never be known."""
        self.stopped.clear()

    def end(self, exit_code: int) -> None:
        """Note that all ranks have ended, or are given up."""
        self.exit_code = exit_code

    def close(self) -> None:
        self.ended = time.time()

    def note_gain(self, step_saved: int | None, gained_s: float) -> None:
        # The ranks' clock measured the gain, and this node's the attempt's length; it may have been set meanwhile.
        self.step_saved, self.gained_s = step_saved, max(0.0, min(gained_s, self.ended - self.started))

    def note_exited(self, ranks: Collection[int]) -> None:
        """Note that ``ranks`` have ended, with any exit code."""
        for rank in set(ranks) - self.gone:
            host = self.rank_hosts[rank]
            self._still_running[host] -= 1
            if not self._still_running[host]:
                del self._still_running[host]
        self.gone |= set(ranks)

    @property
    def hosts_with_ranks(self) -> set[str]:
        return {*self._still_running}

    @property
    def all_reachable_have_ended(self) -> bool:
        """True if a node is lost, whose ranks cannot be waited for, and every rank on the other nodes has ended."""
        # Asked after each event, so the common case is cheap.
        running, lost = self._still_running, self.lost_nodes
        return bool(lost) and len(running) <= len(lost) and running.keys() <= lost

    def on_progress(self, progress: RunProgress) -> None:
        """Take rank 0's report of the run, which tells how long the loop has worked."""
        self.progress = progress
        if progress.spent:
            # The loop began that long ago by this node's clock. Reports arrive late, so the earliest such time is best.
            began = time.time() - sum(progress.spent.values())
            self.first_step = min(began, self.first_step or began)

    def note_printed(self, printed: OutputFigures) -> None:
        self.printed = printed

    @property
    def mean_step_s(self) -> float | None:
        """Return the seconds for each step so far, saves included; None before the first."""
        step, start = self.progress.step, self.progress.step_start
        if self.first_step is None or step is None or start is None or step <= start:
            return None
        return (time.time() - self.first_step) / (step - start)

    def nodes_at_fault(self, suspect: str | None) -> dict[str, str]:
        """Return the nodes that have ended this attempt, with the reason. A drained node does not count."""
        at_fault = dict.fromkeys(sorted(self.lost_nodes), "it was lost")
        at_fault |= {host: bad.why for host, bad in self.vacated_nodes.items() if not bad.is_drained}
        if suspect is not None and suspect not in at_fault:
            reason = next((failure.how for failure in self.failures if failure.host == suspect), "a hang")
            at_fault[suspect] = reason
        return at_fault

    @property
    def lost_s(self) -> float:
        """Return the time of an ended attempt in which nothing was gained."""
        return max(0.0, self.ended - self.started - self.gained_s)

    @property
    def phase(self) -> RunState:
        """Return the run's state while the attempt runs."""
        if self.stop is not None:
            return RunState.STOPPING
        return RunState.RUNNING if 0 in self.heard or self.has_begun else RunState.STARTING
