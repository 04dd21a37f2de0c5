"""``after.json``: what a run waits for before it starts. `toolkit.run.records.awaited` finds out how that stands."""

from __future__ import annotations

from pathlib import Path

from toolkit.base import fsio
from toolkit.files.run_files import AfterRecord
from toolkit.files.rundir import RunDir

#: Begins the cause of a run that has failed because it waited in vain.
NEVER_STARTED = "never started"


def record_of(run: RunDir, damage: list[str] | None = None) -> AfterRecord | None:
    """Return the runs and sweeps that the run waits for; None if there are none.

    Raises DamagedFileError for a damaged file, unless ``damage`` is there to get it.
    """
    return AfterRecord.read(_path(run)) if damage is None else AfterRecord.read_or_none(_path(run), damage)


def write(run: RunDir, record: AfterRecord) -> None:
    """Make the run wait for the runs and sweeps of ``record``."""
    fsio.write_json(_path(run), record.to_file())


def end(run: RunDir) -> None:
    """Note that all runs and sweeps that the run has waited for have completed."""
    _path(run).unlink(missing_ok=True)


def _path(run: RunDir) -> Path:
    return run.path / "after.json"


def names(record: AfterRecord | None) -> list[str]:
    """Return the names of what is waited for: ``run NAME/ID``, ``sweep NAME``."""
    if record is None:
        return []
    runs = (f"run {path.parent.name}/{path.name}" for path in map(Path, record.runs))
    return [*runs, *(f"sweep {Path(path).name}" for path in record.sweeps)]


def sentence(waits_for: list[str]) -> str:
    """Return what :func:`names` tells as a sentence; empty if it names nothing."""
    verb = "has" if len(waits_for) == 1 else "have"
    return f"waits until {' and '.join(waits_for)} {verb} completed" if waits_for else ""
