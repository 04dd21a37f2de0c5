"""The supervisor's data about the attempt that runs now."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from toolkit.files.run_files import AttemptStatus, RunProgress, RunResult, RunState, Start
from toolkit.nodes.allocation import Allocation
from toolkit.run.attempt.facts import RankFailure, Stop
from toolkit.run.job.nodes import BadNode
from toolkit.run.job.slurm_job import JobFate


@dataclass
class Attempt:
    """One start of the ranks, on ``plan``'s nodes."""

    number: int
    started: float
    plan: Allocation
    start: Start | None = None  #: None for foreign scripts, which report nothing
    first_step: float | None = None  #: when the first step began, as closely as rank 0's reports tell
    left_over: AttemptStatus | None = None  #: the status, if an earlier supervisor wrote it
    hang: RankFailure | None = None
    failures: list[RankFailure] = field(default_factory=list)
    stopped: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)
    finished: set[int] = field(default_factory=set)  #: those of them that ended with exit code 0
    lost_nodes: set[str] = field(default_factory=set)
    cut_links: set[tuple[str, str]] = field(default_factory=set)  #: the first node could not connect to the second
    silent_nodes: set[str] = field(default_factory=set)  #: their agents have ended, and they may be dead
    progress: RunProgress = field(default_factory=RunProgress)  #: rank 0's latest report of the run
    heard: dict[int, str] = field(default_factory=dict)  #: the ranks that have reported, with their hosts
    has_begun: bool = False  #: a script's first rank has its log; it may never report
    result: RunResult | None = None  #: as rank 0 has delivered it
    stop: Stop | None = None
    stop_note: str = ""  #: for ``Stop.HALVING``: what the run was compared with
    stop_asked: float | None = None
    vacated_nodes: Mapping[str, BadNode] = field(default_factory=dict)  #: to be replaced by spares, with the reason
    kill_at: float | None = None
    killed: bool = False
    ask_slurm_at: float | None = None  #: when to check whether Slurm is ending the job
    slurm: JobFate = JobFate.ABSENT
    exit_code: int | None = None
    ended: float = 0.0
    step_saved: int | None = None  #: the newest checkpoint at its end
    gained_s: float = 0.0  #: see `goodput.gained_s`

    @classmethod
    def of_status(cls, status: AttemptStatus, allocation: Allocation) -> Attempt:
        """Return the attempt whose supervisor has died, from the ``status`` that it wrote."""
        assert status.attempt is not None
        plan = replace(allocation, hosts=status.nodes, tasks=status.tasks)
        started = time.time() if status.started is None else status.started
        return cls(status.attempt, started, plan, progress=status.progress)

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

    def note_gone(self, ranks: Collection[int]) -> None:
        """Note that ``ranks`` have ended, with any exit code."""
        for rank in set(ranks) - self.gone:
            host = self.rank_hosts[rank]
            self._still_running[host] -= 1
            if not self._still_running[host]:
                del self._still_running[host]
        self.gone |= set(ranks)

    @property
    def hosts_with_ranks(self) -> set[str]:
        """Return the nodes of which not all ranks have ended."""
        return {*self._still_running}

    @property
    def all_reachable_have_ended(self) -> bool:
        """True if a node is lost and every rank on the other nodes has ended.

        Ranks on lost nodes cannot be waited for. All other ranks must be gone before the next attempt.
        """
        return bool(self.lost_nodes) and self.hosts_with_ranks <= self.lost_nodes

    def hear_progress(self, progress: RunProgress) -> None:
        """Take rank 0's report of the run, which tells how long the loop has worked."""
        self.progress = progress
        if progress.spent:
            # The loop began that long ago by this node's clock. Reports arrive late, so the earliest such time is best.
            began = time.time() - sum(progress.spent.values())
            self.first_step = min(began, self.first_step or began)

    @property
    def mean_step_s(self) -> float | None:
        """Return the seconds for each step so far, saves included; None before the first."""
        step, start = self.progress.step, self.progress.step_start
        if self.first_step is None or step is None or start is None or step <= start:
            return None
        return (time.time() - self.first_step) / (step - start)

    @property
    def save_s(self) -> float:
        """Return the seconds that a save takes, as far as rank 0 has reported."""
        return self.progress.save_s or 0.0

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
