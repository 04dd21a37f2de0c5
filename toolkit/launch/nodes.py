"""Which of the job's nodes an attempt runs on: spares stand in for nodes that died, fail again and again, or are sick.

Bad nodes are remembered in the run's ``nodes.json``, so that a requeued job is kept off them and, where Slurm gives
them back all the same, uses them last. `toolkit resume` forgets them: whoever says it has had the time to look.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from toolkit import fsio, logs, records
from toolkit.launch.allocation import Allocation
from toolkit.launch.ending import SUSPICIONS_TO_CONDEMN
from toolkit.records import MOMENT, TEXT, MapOf, Record
from toolkit.rundir import RunDir

log = logs.get(__name__)


@dataclass(frozen=True)
class BadNode:
    """Why, and since when (seconds since the epoch), a node is not to be used."""

    why: str
    since: float


class Nodes:
    """The job's nodes, in the order in which attempts fill them."""

    def __init__(self, run: RunDir, allocation: Allocation, *, spare: int, allow_fewer: bool) -> None:
        """``spare`` of the allocation's nodes are kept for others' place. Raises RequestError where none is left."""
        self._run = run
        self._allocation = allocation
        self._wanted = len(allocation.without(spare).hosts)
        self._allow_fewer = allow_fewer
        self._out: dict[str, str] = {}
        self._bad = remembered(run)

    @property
    def bad(self) -> Mapping[str, BadNode]:
        """Every node of this run that was found bad, also by earlier jobs."""
        return self._bad

    @property
    def can_lose_one(self) -> bool:
        """Whether the run could go on here with a node less."""
        return self._is_enough(len(self._usable()) - 1)

    def plan(self) -> Allocation | None:
        """What the next attempt runs on; None where too few nodes are left."""
        usable = sorted(self._usable(), key=lambda host: host in self._bad)  # the last choice, but better than none
        return self._allocation.on(usable[: self._wanted]) if self._is_enough(len(usable)) else None

    def _usable(self) -> list[str]:
        return [host for host in self._allocation.hosts if host not in self._out]

    def _is_enough(self, count: int) -> bool:
        return count >= (1 if self._allow_fewer else self._wanted)

    def given_up(self, since: float) -> set[str]:
        """Return the nodes that another node has found bad since then: perhaps ours, if it was cut off for a while."""
        return {host for host, bad in remembered(self._run).items() if bad.since > since}

    def condemn(self, host: str, why: str) -> None:
        """This job does not use ``host`` any more, and the run remembers it."""
        if host not in self._out:
            log.warning("node %s is not used any more: %s", host, why)
        self._out[host] = why
        self._remember(host, why)

    def suspect(self, host: str, count: int) -> bool:
        """Note that ``host`` has ended ``count`` attempts of this run. True if it is out now, and others go on."""
        if count < SUSPICIONS_TO_CONDEMN or host in self._out:
            return False
        why = f"ended {count} attempts"
        self._out[host] = why
        if self.plan() is None:  # better than no node at all, until the job is requeued without it
            del self._out[host]
            self._remember(host, why)
            return False
        self.condemn(host, why)
        return True

    def _remember(self, host: str, why: str) -> None:
        self._bad = {**self._bad, host: BadNode(why, time.time())}
        try:
            remember(self._run, host, why)
        except OSError as error:  # a full disk: this job knows it all the same
            log.error("%s: cannot be written: %s", _path(self._run), error)


def remember(run: RunDir, host: str, why: str) -> None:
    """Add ``host`` to the run's bad nodes. A file that is damaged is kept beside the new one."""
    damage: list[str] = []
    known = {name: asdict(bad) for name, bad in remembered(run, damage).items()}
    if damage:
        records.set_aside(_path(run), damage)
    fsio.write_json(_path(run), {**known, host: asdict(BadNode(why, time.time()))})


def remembered(run: RunDir, damage: list[str] | None = None) -> dict[str, BadNode]:
    """Return the run's bad nodes by name, those that can be read; ``damage`` as in :meth:`RunDir.status`."""
    noted: dict[str, Any] = records.read_or(_path(run), _NODES, {}, damage)
    return {host: BadNode(each["why"], each["since"]) for host, each in noted.items()}


_NODES = MapOf(Record({"why": TEXT, "since": MOMENT}))


def forget(run: RunDir) -> None:
    """All nodes are good again."""
    _path(run).unlink(missing_ok=True)


def _path(run: RunDir) -> Path:
    return run.path / "nodes.json"
