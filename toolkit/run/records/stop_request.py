"""A user's request for a run, as a file. It outlives processes, and a requeued job finds it."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

from toolkit.base import fsio
from toolkit.base.errors import DamagedFileError
from toolkit.files import records
from toolkit.files.json_record import FileRecord
from toolkit.files.run_files import Moment, RunState
from toolkit.files.rundir import RunDir


class Intent(StrEnum):
    """What a user may request. After either the run is not brought back by itself."""

    STOP = "stop"  #: commit, then end
    CANCEL = "cancel"  #: end


@dataclass(frozen=True)
class Request(FileRecord):
    """``intent.json``: what a user has requested, and when."""

    intent: Intent
    time: Moment | None = None


def ask(run: RunDir, intent: Intent) -> None:
    """Record the request; a stop does not replace a cancel. The supervisor looks for it."""
    if intent is Intent.STOP and asked(run) is Intent.CANCEL:
        return
    fsio.write_json(run.path / "intent.json", Request(intent, time.time()).to_file())


def asked(run: RunDir, damage: list[str] | None = None) -> Intent | None:
    """Return what was requested, if anything.

    A damaged file tells that an end was requested, but not which: it is taken for a stop, which loses nothing.
    """
    try:
        request = Request.read(run.path / "intent.json")
    except DamagedFileError as error:
        records.note(f"{error}; taken for a stop, `toolkit resume {run.id}` goes on", damage)
        return Intent.STOP
    return None if request is None else request.intent


def end_state(intent: Intent | None) -> RunState:
    """Return the state of a run that ends by this request. Without one its job was cancelled in Slurm."""
    return RunState.STOPPED if intent is Intent.STOP else RunState.CANCELLED


def clear(run: RunDir, before: float | None = None) -> None:
    """Remove the request: a resumed run is wanted again. One that was made after ``before`` stays."""
    with suppress(DamagedFileError):
        request = Request.read(run.path / "intent.json")
        if before is not None and request is not None and (request.time or 0.0) > before:
            return
    (run.path / "intent.json").unlink(missing_ok=True)
