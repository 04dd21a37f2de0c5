"""What a user has asked of a run, as a file: it outlives processes, and a requeued job finds it."""

from __future__ import annotations

import time

from toolkit import fsio
from toolkit.rundir import RunDir


def cancel(run: RunDir) -> None:
    """From now on this run is not to be brought back by itself."""
    fsio.write_json(run.path / "cancel.json", {"time": time.time()})


def cancelled(run: RunDir) -> bool:
    """Whether a user has cancelled the run."""
    return (run.path / "cancel.json").exists()


def clear(run: RunDir) -> None:
    """A resumed run is wanted again."""
    (run.path / "cancel.json").unlink(missing_ok=True)
