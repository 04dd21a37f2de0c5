"""What a user has asked of a run, as a file: it outlives processes, and a requeued job finds it."""

from __future__ import annotations

import time
from enum import StrEnum

from toolkit import fsio
from toolkit.rundir import RunDir


class Intent(StrEnum):
    """Either way the run is not brought back by itself."""

    STOP = "stop"  #: commit, then end
    CANCEL = "cancel"  #: end


def ask(run: RunDir, intent: Intent) -> None:
    """Note what is wanted; who has cancelled a run does not want it stopped only. The supervisor must be told, too: it
    does not look by itself."""
    if intent is Intent.STOP and asked(run) is Intent.CANCEL:
        return
    fsio.write_json(run.path / "intent.json", {"intent": intent, "time": time.time()})


def asked(run: RunDir) -> Intent | None:
    """What is wanted, if anything."""
    note = fsio.read_json(run.path / "intent.json")
    return Intent(note["intent"]) if note else None


def clear(run: RunDir) -> None:
    """A resumed run is wanted again."""
    (run.path / "intent.json").unlink(missing_ok=True)
