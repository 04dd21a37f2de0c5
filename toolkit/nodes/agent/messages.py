"""What the supervisor and the agents send each other: one frozen record for each kind of message.

Orders go to the agents. Those that derive from :class:`NodeRequest` have an answer, which has the request's number.
The agents send everything else.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias

from toolkit.files.records import JsonRecord, Scalar, SchemaError, decode
from toolkit.nodes.agent.reports import ProgressSummary, RankProgress

#: A text with any characters, such as a path or a variable that is not UTF-8.
_Raw: TypeAlias = Annotated[str, Scalar("text", lambda value: isinstance(value, str))]
#: Negative: the number of the signal that has ended the process.
ExitCode: TypeAlias = Annotated[int, Scalar("an exit code", lambda value: type(value) is int)]


@dataclass(frozen=True)
class Message(JsonRecord):
    """A message of one end to the other."""


@dataclass(frozen=True)
class NodeRequest(Message):
    """An order. :class:`toolkit.nodes.start.agents.Agents` gives it the number that its answer has."""

    request: int = field(default=0, kw_only=True)


# ------------------------------------------------------------------------------------------------ from the supervisor


@dataclass(frozen=True)
class Heartbeat(Message):
    """Nothing to do: the supervisor lives."""


@dataclass(frozen=True)
class WarmOrder(Message):
    """Have a zygote ready."""


@dataclass(frozen=True)
class CheckOrder(NodeRequest):
    """Run a check of the node. The answer is a :class:`CheckAnswered`."""

    command: tuple[_Raw, ...]


@dataclass(frozen=True)
class StuckConnectionsOrder(NodeRequest):
    """Tell which addresses leave connections unanswered, by a :class:`StuckConnectionsAnswered`."""


@dataclass(frozen=True)
class ReportsOrder(NodeRequest):
    """Pass on what the ranks have reported. Then answer."""


@dataclass(frozen=True)
class StacksOrder(NodeRequest):
    """Report what the ranks of the node do, as ``command`` finds it: `node_watch.stack_summary`."""

    attempt: int
    command: tuple[_Raw, ...]
    run: _Raw  #: its folder
    rank_progress: tuple[RankProgress, ...]
    whole: bool = False
    outside: bool = False
    may_end: bool = False
    remove: bool = False


@dataclass(frozen=True)
class WatchRanksOrder(NodeRequest):
    """Watch a script that reports nothing by ``command``, which sends :class:`ScriptRankStatus`; else stop it."""

    attempt: int
    command: tuple[_Raw, ...]


@dataclass(frozen=True)
class ProcessSpec(JsonRecord):
    """A process to start. ``rank``: None for the attempt's store."""

    rank: int | None
    environ: Mapping[str, _Raw]
    log: _Raw


@dataclass(frozen=True)
class StartOrder(Message):
    """Start processes of an attempt, the store or ranks. Each ends with a :class:`ProcessEnded`."""

    attempt: int
    module: tuple[_Raw, ...] | None  #: that a fork of the zygote runs, with its arguments
    command: tuple[_Raw, ...]
    environ: Mapping[str, _Raw]  #: what differs from the agents' environment
    unset: tuple[_Raw, ...]
    processes: tuple[ProcessSpec, ...]
    cpus_per_task: int | None
    tasks_per_gpu: int
    gets_signals: bool  #: those that Slurm sends a job; else the agent passes them on


#: Signals that also end ranks that have not started yet. Sent to nobody they would be lost: the ranks would start, and
#: never hear that they are to end.
ENDING = (signal.SIGKILL, signal.SIGTERM)


@dataclass(frozen=True)
class SignalOrder(Message):
    """Send all ranks of an attempt a signal; one in ``ENDING`` also ends those that have not started."""

    attempt: int
    number: int


@dataclass(frozen=True)
class StoreInput(Message):
    """Write to the store's standard input; an empty text closes it."""

    attempt: int
    text: _Raw


@dataclass(frozen=True)
class EndStoreOrder(Message):
    """Kill the store."""

    attempt: int


@dataclass(frozen=True)
class WatchBatchHostOrder(Message):
    """Run ``command`` when the supervisor is silent or gone. ``turn`` is the node's, see :mod:`.node`."""

    command: tuple[_Raw, ...]
    turn: int


@dataclass(frozen=True)
class StageOrder(Message):
    """Make copies of shared files. What is started meanwhile waits ``wait_s`` for them."""

    request: Mapping[str, Any]  #: a ``CopyRequest`` of :mod:`toolkit.plugins.staging.copying`
    wait_s: float


@dataclass(frozen=True)
class LeaveOrder(Message):
    """End."""


# ----------------------------------------------------------------------------------------------------- from an agent


@dataclass(frozen=True)
class AgentHere(Message):
    """The first message. ``again``: an earlier supervisor has started the agent."""

    host: str
    start: int  #: the number of its start
    again: bool


@dataclass(frozen=True)
class NodeAlive(Message):
    """What an agent sends each second: the ranks' progress, and a new sample of what the job uses, if there is one."""

    progress: ProgressSummary | None = None
    usage: Mapping[str, Any] | None = None  #: a ``NodeUsage`` of :mod:`toolkit.plugins.node_watch.usage`


@dataclass(frozen=True)
class RanksReporting(Message):
    """These ranks on ``host`` have reported for the first time in the attempt."""

    attempt: int
    host: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class MainRankReport(Message):
    """A report of rank 0, unchecked."""

    text: _Raw


@dataclass(frozen=True)
class RequestAnswered(Message):
    """The answer to a request: all that was asked for has been sent."""

    request: int


@dataclass(frozen=True)
class CheckAnswered(RequestAnswered):
    """What a check of the node has printed, and its node's clock before and after."""

    text: _Raw
    began: float
    ended: float


@dataclass(frozen=True)
class StuckConnectionsAnswered(RequestAnswered):
    """Addresses that leave connections of the node unanswered."""

    addresses: tuple[str, ...]


@dataclass(frozen=True)
class StacksAnswered(RequestAnswered):
    """What the ranks of the node do: the groups of :mod:`toolkit.plugins.node_watch.stack_summary` as JSON."""

    groups: Any


@dataclass(frozen=True)
class NodeSick(Message):
    """Something makes the node unfit for ranks. It is sent once."""

    what: str


@dataclass(frozen=True)
class ZygoteReady(Message):
    """A zygote has imported what ranks need."""

    import_s: float
    waited_s: float  #: of it, for files
    is_of_a_copy: bool
    has_torch: bool


@dataclass(frozen=True)
class StoreOutput(Message):
    """What the attempt's store has printed."""

    attempt: int
    text: _Raw


@dataclass(frozen=True)
class ProcessEnded(Message):
    """A process of an attempt has ended. ``rank``: None for the store."""

    attempt: int
    rank: int | None
    code: ExitCode
    out_of_memory: bool
    time: float


@dataclass(frozen=True)
class ProcessNotStarted(Message):
    """A process of an attempt could not be started."""

    attempt: int
    rank: int | None
    why: str


@dataclass(frozen=True)
class AgentSignalled(Message):
    """The agent has got SIGTERM, and the ranks with it: Slurm sends it to the whole job."""


@dataclass(frozen=True)
class NodeStaged(Message):
    """The copies that the node has, by the paths of their originals."""

    copies: Mapping[str, _Raw]
    problems: tuple[str, ...]
    damaged: tuple[str, ...] = ()  #: keys of packages
    took_s: float = 0.0


@dataclass(frozen=True)
class ScriptRankStatus(Message):
    """What a rank of a script that reports nothing does, as its node sees it."""

    attempt: int
    rank: int
    state: str  #: see :mod:`toolkit.plugins.node_watch.silent_scripts`
    still_s: float  #: without a sign of life


@dataclass(frozen=True)
class RankWatchEnded(Message):
    """Nothing more comes of the activity of the node's ranks."""

    attempt: int


# --------------------------------------------------------------------------------------------------------- as bytes

_KINDS = {kind.__name__: kind for base in (Message, NodeRequest, RequestAnswered) for kind in base.__subclasses__()}


def encoded(message: Message) -> bytes:
    return json.dumps([type(message).__name__, message.to_json()]).encode()


def decoded(content: bytes) -> Message:
    """Return the message in ``content``. Raises SchemaError."""
    try:
        name, fields = json.loads(content)
        kind = _KINDS[name]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise SchemaError(f"{content[:80]!r} is not a message") from None
    return decode(kind, fields)
