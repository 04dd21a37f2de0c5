"""The interface between the supervisor and its launchers, which start an attempt's ranks and store.

Every launcher puts events into the supervisor's queue: :class:`RanksExited` as soon as a rank ends badly,
:class:`AllRanksEnded` when all have ended and their reports are in the queue. Nothing polls. What the agents send about
ranks goes there as they have sent it, and a report of rank 0 as its :class:`~toolkit.nodes.agent.reports.RankReport`.
"""

from __future__ import annotations

import json
import re
import signal
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol

from toolkit.base import logs, this_node
from toolkit.base.errors import RequestError
from toolkit.nodes.agent.reports import Digest
from toolkit.nodes.allocation import Allocation

log = logs.get(__name__)

#: Slurm's words for a step that fits no job of this request, and for one of a job that is over.
_UNFIT = re.compile(
    "Insufficient GRES|Invalid generic resource|Invalid GRES|Requested node configuration is not available"
)
_OVER = re.compile("(?i)invalid job id|expired or invalid job")


@dataclass(frozen=True)
class RanksExited:
    """Ranks that ended badly on ``host``, by a ``signal`` or not. ``with_agent``: all of the node's; it may be dead."""

    ranks: tuple[int, ...]
    host: str
    how: str
    signal: int | None
    time: float
    exit_code: int | None = None
    out_of_memory: bool = False
    with_agent: bool = False


@dataclass(frozen=True)
class RanksFinished:
    """Ranks that ended with exit code 0. srun does not report them: only agents do."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class NodeFailed:
    """A node of the attempt does not answer, or srun has lost it."""

    host: str


@dataclass(frozen=True)
class LaunchFailed:
    """Slurm could not start these ranks on ``host``; no ranks: it refused the whole step."""

    ranks: tuple[int, ...]
    host: str | None
    why: str

    @property
    def advice(self) -> str | None:
        """Return what to do where no node is at fault, and no other node, and no later try, would help."""
        if _OVER.search(self.why):
            return "the job is over: submit another one"
        return "ask for other nodes or GPUs" if _UNFIT.search(self.why) else None


@dataclass(frozen=True)
class AllRanksEnded:
    """All ranks have ended; 0 if each did so with exit code 0."""

    exit_code: int


@dataclass(frozen=True)
class Progress:
    """The progress of the ranks on ``host``; sent once a second."""

    host: str
    digest: Digest


Events = SimpleQueue[Any]


class RunningRanks(Protocol):
    """The running ranks of one attempt."""

    tells_each_end: bool  #: True if RanksExited or RanksFinished comes of every rank that ends

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send every rank a signal, without waiting; SIGKILL ends all at once."""

    def abandon(self) -> None:
        """Stop waiting for ranks that cannot be reached, and send nothing more."""


class Store(Protocol):
    """The store of one attempt."""

    def propose(self, kind: str, by: str) -> None:
        """Have the ranks agree on a step for ``kind``."""

    def close(self) -> None:
        """End the store."""


class Launcher(Protocol):
    """Starts the store and the ranks of an attempt."""

    def open(self, command: Sequence[str], environ: Mapping[str, str], events: Events) -> None:
        """Let agents connect, which are prepared for ranks that run ``command``. Called once, before all else.

        All that happens goes into ``events``. Agents of a killed supervisor return now, if they can start ranks.
        """

    def prepare(self, hosts: Collection[str]) -> None:
        """Start the agents of all nodes, those of ``hosts`` first. Waits only for those that may return."""

    def start_store(self, attempt: int, world_size: int, host: str, environ: Mapping[str, str]) -> Store:
        """Start the store on this node, at its address ``host``."""

    def start(
        self, attempt: int, allocation: Allocation, command: Sequence[str], environ: Mapping[str, str], store: Store
    ) -> RunningRanks:
        """Start ``command`` on every rank of ``allocation``, with the store's port as ``MASTER_PORT``."""


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


#: A rank's connections to the store: the process group's and, with NCCL, a clone of it; the gate's watcher; requests;
#: saves; and in a user's loop the thread that tells other ranks where this one is.
CONNECTIONS_A_RANK = 6
#: The files that the store host has open besides its connections.
OTHER_FILES = 64


@dataclass(frozen=True)
class StoreHostEnded:
    """The store host ended by itself, which it must not."""

    exit_code: int
    out_of_memory: bool = False


def port_in(line: str) -> int | None:
    """Return the port that a store host has printed. None for a library's output, which goes into the log."""
    try:
        return int(json.loads(line)["port"])
    except (ValueError, TypeError, KeyError):
        log.warning("the store host says: %s", line.rstrip())
        return None


def refuse_too_many_ranks(world_size: int) -> None:
    """Raise RequestError for more ranks than a store host on this node has open files for, one each connection."""
    needed, limit = CONNECTIONS_A_RANK * world_size + OTHER_FILES, this_node.hard_limit()
    if needed > limit:
        raise RequestError(
            f"{world_size} ranks need {needed} open files on {socket.gethostname()}, where their store is "
            f"({CONNECTIONS_A_RANK} connections each), and its hard limit is {limit}: raise it (`ulimit -Hn`; "
            f"LimitNOFILE of slurmd), or run at most {(limit - OTHER_FILES) // CONNECTIONS_A_RANK} ranks"
        )
