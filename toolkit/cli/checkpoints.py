"""Which checkpoints of a run a user means."""

from __future__ import annotations

from pathlib import Path

from toolkit.base.errors import RequestError
from toolkit.checkpoint.folder import CheckpointFolder, step_of
from toolkit.files.rundir import RunDir


def pick(run: RunDir, text: str | None) -> list[Path]:
    """Return the checkpoint of step ``text``, or all. Raises RequestError that says which there are."""
    return pick_of(run, list(CheckpointFolder(run.checkpoints).list()), text)


def pick_of(run: RunDir, there: list[Path], text: str | None) -> list[Path]:
    """Return those of ``there`` that have this name or step."""
    chosen = [path for path in there if text in (None, path.name, str(step_of(path)))]
    if not chosen:
        steps = ", ".join(str(step_of(path)) for path in there) or "none"
        which = "" if text is None else f" of step {text}"
        raise RequestError(f"run {run.id}: no checkpoint{which}; there are: {steps}")
    return chosen
