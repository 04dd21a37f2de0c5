"""Which of the job's nodes an attempt runs on.

Spares replace nodes that died, fail repeatedly, are sick or are drained. Bad nodes are remembered in the run's
``nodes.json``. So a requeued job is kept off them and, where Slurm gives it such a node all the same, uses it last.
`toolkit resume` forgets them: the user who calls it has had the time to look.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit.base import fsio, logs
from toolkit.base.errors import DamagedFileError
from toolkit.files import records
from toolkit.files.records import JsonRecord
from toolkit.files.run_files import Moment
from toolkit.files.rundir import RunDir
from toolkit.nodes.allocation import Allocation, Shape

#: A node that ended this many attempts is bad: by a signal of unknown sender, a device error, or a hang.
SUSPICIONS_TO_CONDEMN = 2

log = logs.get(__name__)


@dataclass(frozen=True)
class BadNode(JsonRecord):
    """Why, and since when (seconds since the epoch), a node is not to be used."""

    why: str
    since: Moment
    is_drained: bool = False  #: Slurm keeps jobs off it until it is well again, and may then use it


class Nodes:
    """The job's nodes, in the order in which attempts fill them."""

    def __init__(
        self,
        run: RunDir,
        allocation: Allocation,
        *,
        spare: int,
        allow_fewer: bool,
        doubtful: Mapping[str, str] | None = None,
    ) -> None:
        """Keep the last ``spare`` of the allocation's nodes as replacements. Raises RequestError where none is left.

        ``doubtful`` nodes, which have ended attempts of other runs, are only used where no others are.
        """
        self._run, self._allocation, self._allow_fewer = run, allocation, allow_fewer
        self._shapes = allocation.shapes
        self._wanted = allocation.without_spares(spare).hosts
        self.out: dict[str, str] = {}  #: the nodes that this job does not use any more, each with the reason
        self.bad = remembered(run)  #: every node of this run that was found bad, also by earlier jobs
        self._degraded: dict[str, BadNode] = {}
        self._placed: list[str] = []  #: the nodes of the last attempt, in the order of their ranks
        #: Nodes that are only used where no others are: slow ones, and those that have ended attempts of other runs.
        self._doubtful = {host: why for host, why in (doubtful or {}).items() if host in allocation.hosts}
        for host, why in self._doubtful.items():
            log.warning("node %s %s", host, why)

    @property
    def degraded(self) -> Mapping[str, BadNode]:
        """The nodes that are in use, or spare, and have something wrong with them."""
        return {host: degraded for host, degraded in self._degraded.items() if host not in self.out}

    def dispensable(self, hosts: Collection[str]) -> set[str]:
        """Return those of ``hosts`` of which any one could be lost, and the run continue in this job."""
        usable = self._usable() if hosts else []
        left, wanted = self._count(usable), self._count(self._wanted)
        if self._allow_fewer:
            return {*hosts} if len(usable) > 1 else set()
        return {host for host in hosts if left[self._shapes[host]] > wanted[self._shapes[host]]}

    def can_lose(self, hosts: Collection[str]) -> bool:
        """True if all of ``hosts`` could be lost, and the run continue in this job."""
        return self._is_enough([host for host in self._usable() if host not in hosts])

    def plan(self) -> Allocation | None:
        """Return the nodes of the next attempt; None where too few are left.

        A node that stays keeps its place: the state of its ranks is in its memory.
        """
        # Suspicious ones come last, but are better than none. Of the others, those that are in use stay.
        suspicious, placed = {*self.bad, *self._degraded, *self._doubtful}, {*self._placed}
        usable = sorted(self._usable(), key=lambda host: (host in suspicious, host not in placed))
        if not self._is_enough(usable):
            return None
        # As many nodes of each shape as the run has ranks for.
        chosen, count_of = list[str](), self._count(self._wanted)
        for host in usable:
            if count_of[self._shapes[host]] > 0:
                count_of[self._shapes[host]] -= 1
                chosen.append(host)
        # Spares take the places of the nodes that leave.
        is_same_size = self._count(chosen) == self._count(self._placed)
        places = self._placed if is_same_size else self._wanted
        # Where no spare steps in, ranks keep the job's order: a component's stay together, and near nodes near.
        stays = {*chosen} & {*places} if is_same_size or {*chosen} == {*places} else set[str]()
        others = {shape: deque[str]() for shape in self._shapes.values()}
        for host in chosen:
            if host not in stays:
                others[self._shapes[host]].append(host)
        filled = []
        for host in places:
            left = others[self._shapes[host]]
            if host in stays:
                filled.append(host)
            elif left:
                filled.append(left.popleft())
        return self._allocation.on(filled)

    def note_used(self, plan: Allocation) -> None:
        """Note that an attempt starts on ``plan``."""
        self._placed = [*plan.hosts]

    def doubt(self, slow: Mapping[str, str]) -> None:
        """Note nodes that are slower than the others. Spares, where there are any, replace them."""
        for host, why in slow.items():
            log.warning("node %s is used last: %s", host, why)
        self._doubtful |= slow

    def _usable(self) -> list[str]:
        return [host for host in self._allocation.hosts if host not in self.out]

    def _is_enough(self, hosts: Sequence[str]) -> bool:
        return bool(hosts) if self._allow_fewer else self._count(hosts) >= self._count(self._wanted)

    def _count(self, hosts: Iterable[str]) -> Counter[Shape | None]:
        """Return the number of nodes of each shape. That of a node of an earlier job is not known."""
        return Counter(self._shapes.get(host) for host in hosts)

    def newly_bad(self, since: float) -> set[str]:
        """Return the nodes that another node has found bad since then. This node may be one, if it was cut off."""
        return {host for host, bad in remembered(self._run).items() if bad.since > since}

    def note(self, *, sick: Mapping[str, str], drained: Mapping[str, str]) -> None:
        """Note what is wrong with which nodes at this moment. A new problem is logged once."""
        before, now = self._degraded, time.time()
        self._degraded = {}
        for host, what in sick.items():
            self._degraded[host] = BadNode(what, now)
        for host, why in drained.items():
            self._degraded[host] = BadNode(f"drained: {why}", now, is_drained=True)
        for host, degraded in self.degraded.items():
            if host not in before or before[host].why != degraded.why:
                log.warning("node %s: %s", host, degraded.why)

    def replaceable(self, at_work: Sequence[str], heard: Collection[str]) -> dict[str, BadNode]:
        """Return the faulty nodes at work that spares without a fault can replace, each with its fault.

        ``heard`` are the nodes with live agents. A drained batch host is not given up: the job keeps it to its end,
        with or without ranks.
        """
        spares = ({*self._usable()} & {*heard}).difference(at_work)
        # A doubtful one is better than one that Slurm takes away, or that is sick.
        good = self._count(host for host in spares if host not in self.bad and host not in self._degraded)
        in_use, leaving = self.degraded, dict[str, BadNode]()
        for host in at_work:
            degraded = in_use.get(host)
            if degraded is None or (degraded.is_drained and host == self._allocation.hosts[0]):
                continue
            # No more nodes leave than there are good spares of their shape.
            if good[self._shapes[host]] > 0:
                good[self._shapes[host]] -= 1
                leaving[host] = degraded
        return leaving

    def condemn(self, host: str, why: str, *, is_drained: bool = False) -> None:
        """Exclude ``host`` from this job, and remember it in the run."""
        if host not in self.out:
            log.warning("node %s is no longer used: %s", host, why)
        self.out[host] = why
        self._remember(host, why, is_drained=is_drained)

    def suspect(self, host: str, count: int) -> bool:
        """Note that ``host`` has ended ``count`` attempts of this run. True if it is out now and others continue."""
        if count < SUSPICIONS_TO_CONDEMN or host in self.out:
            return False
        why = f"ended {count} attempts"
        self.out[host] = why
        if self.plan() is None:  # a bad node is better than none, until the job is requeued without it
            del self.out[host]
            self._remember(host, why)
            return False
        self.condemn(host, why)
        return True

    def _remember(self, host: str, why: str, *, is_drained: bool = False) -> None:
        self.bad = {**self.bad, host: BadNode(why, time.time(), is_drained)}
        try:
            remember(self._run, host, why, is_drained=is_drained)
        except (OSError, DamagedFileError) as error:  # a full disk: this job knows it all the same
            log.error("%s: %s is not recorded: %s", _path(self._run), host, error)


def remember(run: RunDir, host: str, why: str, *, is_drained: bool = False) -> None:
    """Add ``host`` to the run's bad nodes. Raises OSError or DamagedFileError where these cannot be read now."""
    known = records.read(_path(run), dict[str, BadNode]) or {}
    known[host] = BadNode(why, time.time(), is_drained)
    fsio.write_json(_path(run), {name: bad.to_json() for name, bad in known.items()})


def remembered(run: RunDir) -> dict[str, BadNode]:
    """Return the run's bad nodes by name. Raises DamagedFileError."""
    try:
        return records.read(_path(run), dict[str, BadNode]) or {}
    except OSError as error:  # of the file server: a run continues without knowing its bad nodes
        records.warn_once(f"{_path(run)} cannot be read: {error.strerror or error}")
        return {}


def forget(run: RunDir) -> None:
    """Forget all bad nodes."""
    _path(run).unlink(missing_ok=True)


def _path(run: RunDir) -> Path:
    return run.path / "nodes.json"
