"""What the files of a run folder hold: a frozen class for each file, whose fields declare the file's keys.

The type of a field says what fits (:func:`_codec`). Where a field has a default its key may be missing, and a value
that does not fit is left out and named (`toolkit.records`): the field then has its default. Without a default it spoils
the record. Keys that a newer version of this package has added are kept in ``extra``, and written again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Self, TypeAlias, Union, get_args, get_origin, get_type_hints

from toolkit import hostlist, records
from toolkit.errors import RequestError
from toolkit.records import COUNT, FLAG, MOMENT, NUMBER, TEXT, TIME_TEXT, WORD, Leaf, ListOf, MapOf, Maybe, Null, OrNull

#: The version of the files that are written here. A file without a ``version`` has version 1.
VERSION = 1


class RunState(StrEnum):
    """How a run stands."""

    QUEUED = "queued"  #: submitted, and not started yet
    REQUEUED = "requeued"  #: back in the queue, or left to a follow-up job
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    RESTARTING = "restarting"  #: between two attempts of one job
    COMPLETED = "completed"
    STOPPED = "stopped"
    FAILED = "failed"
    CANCELLED = "cancelled"
    UNREADABLE = "unreadable"  #: it has ended, and its result can no longer be read

    @property
    def is_waiting(self) -> bool:
        """True for a run that waits for Slurm."""
        return self in (RunState.QUEUED, RunState.REQUEUED)

    @property
    def has_ranks(self) -> bool:
        """True while ranks may run."""
        return self in (RunState.STARTING, RunState.RUNNING, RunState.STOPPING)

    @property
    def is_cut_short(self) -> bool:
        """True for a run that was ended early, and not by a failure."""
        return self in (RunState.STOPPED, RunState.CANCELLED)

    @property
    def is_over(self) -> bool:
        """True for a run that has ended: only a user starts it again."""
        return not (self.is_waiting or self.has_ranks or self is RunState.RESTARTING)


# ------------------------------------------------------------------------------------------- how a record is declared


@dataclass(frozen=True)
class Codec:
    """How a value is kept in JSON: its shape there, and the ways to and from it."""

    shape: records.Shape
    load: Callable[[Any], Any] = lambda value: value
    dump: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True)
class JsonRecord:
    """A record in a JSON file.

    It is written with the keys that it was made or read with, and no others: a writer that does not know a value
    does not write its default.
    """

    extra: Mapping[str, Any] = field(default_factory=dict, kw_only=True)  #: keys that this version does not know
    _keys: tuple[str, ...] = field(default=(), init=False, repr=False, compare=False)

    def __new__(cls, *values: Any, **named: Any) -> Self:
        record = super().__new__(cls)
        by_position = [each.name for each in dataclasses.fields(cls) if each.init and not each.kw_only]
        object.__setattr__(record, "_keys", (*by_position[: len(values)], *named))
        return record

    @classmethod
    def load(cls, value: Mapping[str, Any]) -> Self:
        """Return the record of a JSON value that fits."""
        codecs = _codecs(cls)
        known = {name: codecs[name].load(item) for name, item in value.items() if name in codecs}
        return cls(**known, extra={name: item for name, item in value.items() if name not in codecs})

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Return the record of a JSON value, all of which must fit. Raises Misfit."""
        return cls.load(records.fit(value, shape_of(cls)))

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON."""
        codecs = _codecs(type(self))
        known = {name: codecs[name].dump(getattr(self, name)) for name in self._keys if name in codecs}
        return {**known, **self.extra}

    def merged(self, other: Self) -> Self:
        """Return the record with the values that ``other`` was made with."""
        return self.replace(**{name: getattr(other, name) for name in other._keys})

    def replace(self, **changes: Any) -> Self:
        """Return the record with other values. Keys that it does not have, and that do not change, stay unwritten."""
        return type(self)(**{**{name: getattr(self, name) for name in self._keys}, **changes})


@dataclass(frozen=True)
class FileRecord(JsonRecord):
    """The content of a file, or a line of one."""

    version: int = field(default=VERSION, kw_only=True)

    @classmethod
    def read(cls, path: Path, damage: list[str] | None = None) -> Self | None:
        """Return the record in ``path`` as far as it fits; None of no file. Raises DamagedFileError for a useless one.

        ``damage`` gets the parts that are left out; without it they are named in the log.
        """
        return cls._of_file(records.read(path, shape_of(cls), damage), path)

    @classmethod
    def read_or_none(cls, path: Path, damage: list[str] | None = None) -> Self | None:
        """Return what :meth:`read` does, and None for a useless file, which is named like a part."""
        return cls._of_file(records.read_or(path, shape_of(cls), None, damage), path)

    @classmethod
    def read_lines(cls, path: Path, damage: list[str] | None = None) -> list[Self]:
        """Return the records in the lines of ``path`` that fit; none of no file."""
        # The file is made with its first line, so an empty one has lost lines.
        lines = records.read_lines(path, shape_of(cls), damage, may_be_empty=False)
        return [record for line in lines if (record := cls._of_file(line, path)) is not None]

    @classmethod
    def _of_file(cls, value: Any, path: Path) -> Self | None:
        if value is None:
            return None
        record = cls.load(value)
        if record.version > VERSION:
            newer = f"{path} has version {record.version}, and this toolkit knows {VERSION}"
            records.note(f"{newer}: it is read as far as it fits", None)
        return record

    def to_file(self) -> dict[str, Any]:
        """Return the record as JSON, with the version."""
        return {"version": self.version, **self.to_json()}


#: For a key that is None if it is missing or does not fit, and is then passed on as null.
_NULL = {"is null": True}


def shape_of(kind: type[JsonRecord]) -> records.Record:
    """Return the shape of a record, by its fields."""
    keys: dict[str, records.Shape | Maybe | Null] = {}
    declared = {each.name: each for each in dataclasses.fields(kind)}
    for name, codec in _codecs(kind).items():
        each = declared[name]
        is_required = each.default is each.default_factory is dataclasses.MISSING
        may_be_missing = Null(codec.shape) if "is null" in each.metadata else Maybe(codec.shape)
        keys[name] = codec.shape if is_required else may_be_missing
    return records.Record(keys)


#: What :func:`_codecs` has found out about each class.
_CODECS: dict[type[JsonRecord], dict[str, Codec]] = {}


def _codecs(kind: type[JsonRecord]) -> dict[str, Codec]:
    if kind not in _CODECS:
        hints = get_type_hints(kind, include_extras=True)
        names = [each.name for each in dataclasses.fields(kind) if each.name not in ("extra", "_keys")]
        _CODECS[kind] = {name: _codec(hints[name]) for name in names}
    return _CODECS[kind]


_LEAVES = {str: TEXT, int: COUNT, float: NUMBER, bool: FLAG}


def _codec(hint: Any) -> Codec:
    """Return how values of this type are kept. A shape or codec in ``Annotated`` comes before the type."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return args[1] if isinstance(args[1], Codec) else Codec(args[1])
    if hint in _LEAVES:
        return Codec(_LEAVES[hint])
    if origin in (Union, UnionType):
        (inner,) = (_codec(arg) for arg in args if arg is not type(None))
        return Codec(OrNull(inner.shape), _or_none(inner.load), _or_none(inner.dump))
    if origin is tuple:
        item = _codec(args[0])
        return Codec(ListOf(item.shape), lambda value: tuple(map(item.load, value)), lambda v: list(map(item.dump, v)))
    if origin is Mapping:
        return Codec(MapOf(_codec(args[1]).shape), dict, dict)
    if issubclass(hint, StrEnum):
        return Codec(records.one_of(*hint), hint, str)
    return Codec(shape_of(hint), hint.load, hint.to_json)


def _or_none(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else convert(value)


# ------------------------------------------------------------------------------------------------- types of the fields

Moment: TypeAlias = Annotated[float, MOMENT]
Word: TypeAlias = Annotated[str, WORD]
_SECONDS = Leaf("a number of seconds", lambda value: NUMBER.fits(value) and 0 <= value < 1e12)
#: Seconds by name, see `toolkit.metrics.goodput`.
Seconds: TypeAlias = Mapping[str, Annotated[float, _SECONDS]]
Metrics: TypeAlias = Mapping[str, float | None]


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


@lru_cache(maxsize=16)
def _hosts(text: str) -> tuple[str, ...] | None:
    """Return the names in a host list; None if it is none. Cached: most attempts of a run have the same nodes."""
    try:
        return tuple(hostlist.expand(text))
    except RequestError:
        return None


_TIME = Codec(TIME_TEXT, lambda text: datetime.fromisoformat(text).timestamp(), _iso)
#: Seconds since the epoch, as text in the file.
Time: TypeAlias = Annotated[float, _TIME]
_HOST_LIST = Leaf("a host list", lambda value: isinstance(value, str) and _hosts(value) is not None)
#: Names of nodes, as a host list in the file: there may be thousands.
Hosts: TypeAlias = Annotated[tuple[str, ...], Codec(_HOST_LIST, lambda text: _hosts(text) or (), hostlist.compress)]


# ------------------------------------------------------------------------------------------------------ parts of files


@dataclass(frozen=True)
class Start(JsonRecord):
    """What led to an attempt. Times in seconds since the epoch."""

    since: Moment  #: the end of the last attempt, or the run's submission
    submitted: Moment | None  #: when the job was submitted or requeued; None for a restart within the job
    queue_s: float
    ready: Moment  #: the start of the job, or the decision to start again
    best_step: int  #: the furthest step of any earlier attempt


@dataclass(frozen=True)
class Straggler(JsonRecord):
    """A node with ranks that are, or were, slow for long. Times in seconds since the epoch."""

    host: Word
    ranks: tuple[int, ...]
    ratio: float  #: to the other ranks: a mean from ``since`` to ``until`` for each of its ranks, of these the median
    since: Moment
    until: Moment | None  #: None while it is slow


@dataclass(frozen=True)
class RunProgress(JsonRecord):
    """Rank 0's report, see `toolkit.train.lifecycle`."""

    step: int | None = None
    step_start: int | None = None
    total_steps: int | None = None
    epoch: int | None = None
    epochs: int | None = None
    samples: int | None = None
    loss: float | None = None
    samples_per_s: float | None = None
    data_wait_fraction: float | None = None
    save_s: float | None = None
    eta_s: float | None = None
    phase: str | None = None
    expendable: tuple[int, ...] = ()
    spent: Seconds = field(default_factory=dict)
    stragglers: tuple[Straggler, ...] = ()
    metrics: Metrics = field(default_factory=dict)


# --------------------------------------------------------------------------------------------------------- status.json


@dataclass(frozen=True)
class AttemptStatus(FileRecord):
    """How a run stands, by the supervisor of its present attempt. Times in seconds since the epoch."""

    state: RunState | None = None
    run: str | None = None
    job_id: str | None = None
    restart_count: int | None = None
    host: str | None = None
    pid: int | None = None
    attempt: int | None = None
    nodes: tuple[Word, ...] = ()
    tasks: tuple[int, ...] = ()
    world_size: int | None = None
    lost_ranks: Mapping[str, str] = field(default_factory=dict)
    bad_nodes: Mapping[str, str] = field(default_factory=dict)
    ailing_nodes: Mapping[str, str] = field(default_factory=dict)
    started: Moment | None = None
    start: Start | None = None
    updated: Moment | None = None
    stop: str | None = None
    progress: RunProgress = field(default_factory=RunProgress)
    submitted: Moment | None = None
    goodput: Seconds = field(default_factory=dict)
    why: str | None = None
    ended: Moment | None = None
    supervised: bool = True


@dataclass(frozen=True)
class RunStatus(AttemptStatus):
    """``status.json``."""

    left_over: AttemptStatus | None = None  #: the status of an attempt that was never closed, see `RunDir.left_over`


# ------------------------------------------------------------------------------------------------------ attempts.jsonl


@dataclass(frozen=True)
class FirstFailure(JsonRecord):
    """The failure that ended an attempt."""

    rank: int | None
    host: str
    how: str


@dataclass(frozen=True)
class AttemptRecord(FileRecord):
    """A line of ``attempts.jsonl``: a closed attempt. Times in seconds since the epoch."""

    attempt: int
    nodes: Hosts
    started: Time
    ended: Time
    cause: str  #: see `toolkit.launch.supervise.facts`, as for the decision; a newer version may have others
    decision: str
    job_id: str | None = field(default=None, metadata=_NULL)
    restart_count: int | None = field(default=None, metadata=_NULL)
    world_size: int | None = field(default=None, metadata=_NULL)
    stop_asked: Time | None = field(default=None, metadata=_NULL)
    step_start: int | None = field(default=None, metadata=_NULL)
    step_end: int | None = field(default=None, metadata=_NULL)
    step_saved: int | None = field(default=None, metadata=_NULL)  #: the newest checkpoint at its end
    gained_s: float = 0.0
    lost_nodes: tuple[str, ...] = ()
    suspect: str | None = field(default=None, metadata=_NULL)
    lost_ranks: Mapping[str, str] = field(default_factory=dict)
    left_nodes: tuple[str, ...] = ()
    first_failure: FirstFailure | None = field(default=None, metadata=_NULL)
    line: str | None = field(default=None, metadata=_NULL)
    slow_nodes: tuple[Straggler, ...] = ()
    submitted: Time | None = field(default=None, metadata=_NULL)
    goodput: Seconds = field(default_factory=dict)

    @property
    def begun(self) -> float:
        """Return when its job was submitted. If that is unknown return when it started."""
        return self.submitted or self.started


# --------------------------------------------------------------------------------------------------------- result.json

_ENDS = tuple(state for state in RunState if state.is_over)


@dataclass(frozen=True)
class RunResult(FileRecord):
    """``result.json``: how the run ended."""

    state: Annotated[RunState, Codec(records.one_of(*_ENDS), RunState, str)]
    attempts: int = 0
    step: int | None = None
    epoch: int | None = None
    samples: int | None = None
    metrics: Metrics = field(default_factory=dict)
    wall_s: float | None = None
    goodput: Seconds = field(default_factory=dict)
    why: str | None = None
