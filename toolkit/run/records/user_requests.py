"""A user's requests for a run, as files. They outlive processes, and a requeued job finds them.

The request to end the run is ``requests/intent.json``. For stacks and profiles a command writes ``requests/ID.json``
and waits for ``requests/ID.answer.json``. The supervisor passes on each request without an answer, also one that was
left for a supervisor before it. One that is answered or withdrawn is not carried out again.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from toolkit.base import fsio
from toolkit.base.errors import DamagedFileError
from toolkit.files import polling, records
from toolkit.files.records import FileRecord, JsonRecord
from toolkit.files.run_files import Moment, RunState
from toolkit.files.rundir import RunDir

_INTENT = "intent.json"


class Intent(StrEnum):
    """How a user may have a run end. After either the run is not brought back by itself."""

    STOP = "stop"  #: commit, then end
    CANCEL = "cancel"  #: end


@dataclass(frozen=True)
class IntentRecord(FileRecord):
    """``requests/intent.json``: what a user has requested, and when."""

    intent: Intent
    time: Moment | None = None


def record_intent(run: RunDir, intent: Intent) -> None:
    """Record the request; a stop does not replace a cancel. The supervisor looks for it."""
    if intent is Intent.STOP and read_intent(run) is Intent.CANCEL:
        return
    run.make_requests()
    fsio.write_json(_intent_path(run), IntentRecord(intent, time.time()).to_json())


def read_intent(run: RunDir) -> Intent | None:
    """Return what was requested, if anything. A damaged file is taken for a stop, which loses nothing."""
    try:
        request = IntentRecord.read(_intent_path(run))
    except DamagedFileError as error:
        records.warn_once(f"{error}; taken for a stop, `toolkit resume {run.id}` continues it")
        return Intent.STOP
    return None if request is None else request.intent


def end_state(intent: Intent | None) -> RunState:
    """Return the state of a run that ends by this request. Without one its job was cancelled in Slurm."""
    return RunState.STOPPED if intent is Intent.STOP else RunState.CANCELLED


def clear_intent(run: RunDir) -> None:
    """Remove the request: a resumed run is wanted again."""
    _intent_path(run).unlink(missing_ok=True)


#: The longest time that a command waits. An older request is left over from a command that was killed.
LONGEST_WAIT_S = 3600.0
#: Begins the kind under which the ranks agree on the step of a request; its id follows.
KIND = "request "
_NAME = re.compile(r"([0-9a-f]+-[0-9a-f]+)\.json")


class RequestKind(StrEnum):
    STACKS = "stacks"
    PROFILE = "profile"


@dataclass(frozen=True)
class UserRequest(FileRecord):
    """``requests/ID.json``."""

    wish: RequestKind
    time: Moment
    rank: int = 0  #: of a profile
    steps: int = 0  #: of a profile
    memory: bool = False  #: of a profile


@dataclass(frozen=True)
class StackGroup(JsonRecord):
    """Ranks with the same stack."""

    ranks: tuple[int, ...]
    doing: str
    still_s: float  #: since the first of them made progress
    stack: tuple[str, ...] = ()  #: of the main thread, innermost frame first; none where it is unknown


@dataclass(frozen=True)
class Answer(FileRecord):
    """``requests/ID.answer.json``: what came of the request."""

    refused: str | None = None  #: why nothing was done
    attempt: int | None = None
    step: int | None = None  #: the first one of the profile
    steps: int | None = None  #: that were profiled
    files: tuple[str, ...] = ()  #: that were written
    groups: tuple[StackGroup, ...] = ()


def put(run: RunDir, request: UserRequest) -> str:
    """Write a request, durably, and return its id. The supervisor looks for it every few seconds."""
    request_id = f"{time.time_ns():x}-{secrets.token_hex(4)}"
    run.make_requests()
    fsio.write_json(_path(run, request_id), request.to_json())
    return request_id


def read_request(run: RunDir, request_id: str) -> UserRequest | None:
    """Return a request. None: it was withdrawn, or answered. Raises DamagedFileError."""
    if fsio.is_there(_answer_path(run, request_id)):
        return None
    return UserRequest.read(_path(run, request_id))


@dataclass(frozen=True)
class PendingRequests:
    """What :func:`scan_requests` has found."""

    is_end_asked: bool = False
    has_viewer: bool = False
    ids: tuple[str, ...] = ()  #: of the requests that wait for an answer, oldest first


def scan_requests(run: RunDir) -> PendingRequests:
    """Look what users ask of the run. Mostly this asks the file server once.

    Requests of commands long killed are removed.
    """
    try:
        names = {path.name for path in run.requests.iterdir()}
    except FileNotFoundError:
        return PendingRequests()
    found = []
    for name in sorted(names):
        match = _NAME.fullmatch(name)
        if match is None or _answer_path(run, match[1]).name in names:
            continue
        with contextlib.suppress(OSError):  # withdrawn at this moment
            if time.time() - _path(run, match[1]).stat().st_mtime > LONGEST_WAIT_S:
                remove(run, match[1])
            else:
                found.append(match[1])
    return PendingRequests(_INTENT in names, polling.MARK in names and polling.has_viewer(run), tuple(found))


def answer(run: RunDir, request_id: str, what: Answer) -> None:
    """Answer a request, unless it was withdrawn. Raises OSError."""
    if fsio.is_there(_path(run, request_id)):
        fsio.write_json(_answer_path(run, request_id), what.to_json())


def answer_to(run: RunDir, request_id: str) -> Answer | None:
    """Return the answer, if there is one. Raises DamagedFileError."""
    return Answer.read(_answer_path(run, request_id))


def remove(run: RunDir, request_id: str) -> None:
    """Remove a request and its answer. A request without an answer is withdrawn by this."""
    # The request first: without it no answer is written.
    for path in (_path(run, request_id), _answer_path(run, request_id)):
        path.unlink(missing_ok=True)


def _intent_path(run: RunDir) -> Path:
    return run.requests / _INTENT


def _path(run: RunDir, request_id: str) -> Path:
    return run.requests / f"{request_id}.json"


def _answer_path(run: RunDir, request_id: str) -> Path:
    return run.requests / f"{request_id}.answer.json"
