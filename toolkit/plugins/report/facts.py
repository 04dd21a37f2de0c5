"""What a report says about a run, from the run's own files. No text of the environment is in it but versions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

from toolkit.base import fsio, logs
from toolkit.base.errors import CheckpointError
from toolkit.checkpoint import manifest
from toolkit.checkpoint.folder import committed, saved_at
from toolkit.cli import run_facts
from toolkit.cli.run_rows import RunRow
from toolkit.files import records
from toolkit.files.run_files import AttemptRecord, SweepPoint
from toolkit.files.rundir import RunDir
from toolkit.metrics import lines
from toolkit.plugins.report.curves import Curve, CurveReader
from toolkit.plugins.report.why import page as why_page
from toolkit.run.prepare.snapshot import SnapshotNote, shown_values

#: A checkpoint: its name, when it was committed, and its bytes.
CheckpointFacts: TypeAlias = tuple[str, float, int]
#: Older checkpoints are only counted.
MOST_CHECKPOINTS = 20

#: What of `toolkit why` may leave the run folder: no lines of logs.
_TOLD = (
    *("run", "state", "why", "cause", "diagnosis", "next", "loss", "last_checkpoint", "step_reached", "steps_lost"),
    *("nodes", "degraded_nodes", "bad_nodes", "stragglers", "goodput", "start_up", "efficiency"),
)
#: The manifest of a larger checkpoint would take seconds to read.
_LARGEST_MANIFEST_BYTES = 1 << 25

log = logs.get(__name__)


@dataclass(frozen=True)
class ReportFacts:
    """One run."""

    run: RunDir
    told: Mapping[str, Any]  #: what `toolkit why` says
    attempts: tuple[AttemptRecord, ...]  #: and the one that runs now, whose cause is its state
    figures: Mapping[str, Any]  #: step, time and metrics at the end, or now
    curves: Mapping[str, Curve]
    config: Mapping[str, str]  #: by dotted key
    hidden: Mapping[str, str] = field(repr=False)  #: the values that ``config`` does not show
    versions: Mapping[str, str]
    checkpoints: tuple[CheckpointFacts, ...] = ()  #: the newest first
    why: str = field(default="", repr=False)  #: the page of `toolkit why`, which has lines of logs: for the live page
    logs: tuple[str, ...] = ()  #: the logs that the live page shows
    row: RunRow | None = field(default=None, repr=False)  #: of the table, as it is now: for the live page
    unread_bytes: int = 0  #: of the metrics, that the live page has not read yet

    @property
    def title(self) -> str:
        return f"{self.run.name}/{self.run.id}"

    @property
    def point(self) -> str:
        """Return what tells a point of a sweep from the others, ``key=value``; empty for another run."""
        point = SweepPoint.read_or_none(self.run.path / "point.json")  # a damaged one must not hide the run
        return ", ".join(f"{key}={self.config.get(key, '?')}" for key in point.values) if point is not None else ""

    def to_json(self) -> dict[str, Any]:
        """Return the facts as JSON, with the curves' ends and extremes instead of their points."""
        told = run_facts.as_data({**self.told, "attempts": self.attempts})
        return {
            **{name: told[name] for name in _TOLD},
            "attempts": told["attempts"],
            "figures": self.figures,
            "curves": {tag: curve.summary() for tag, curve in self.curves.items()},
            "config": self.config,
            "versions": self.versions,
        }


def facts_of(run: RunDir, row: RunRow | None = None, curves: Mapping[str, Curve] | None = None) -> ReportFacts:
    """Return the facts about ``run``. Raises DamagedFileError where a file of it cannot be read.

    The live page has the run's ``row`` and ``curves``. For it, the facts include lines of logs.
    """
    told = run_facts.facts(run, row)
    why = "" if row is None else why_page.format_text(told, whole=True)
    # The line of a log that gave the cause away stays in the run folder.
    if found := told["diagnosis"]:
        told["diagnosis"] = {name: found[name] for name in ("cause", "next", "rank", "host")}
    status, result = run.status(), run.result()
    progress = status.progress
    figures: dict[str, Any] = {name: getattr(progress, name) for name in ("step", "total_steps", "metrics")}
    # The result of a run that has ended replaces the last report of its ranks.
    if result is not None:
        more = {name: getattr(result, name) for name in ("step", "epoch", "samples", "wall_s", "metrics")}
        figures |= {name: value for name, value in more.items() if value not in (None, {})}
    attempts = list(told["attempts"])
    if status.attempt and status.started is not None and all(line.attempt != status.attempt for line in attempts):
        # The current attempt has no line in the file yet. Its cause is its state, and its end is the latest status.
        current = AttemptRecord(
            status.attempt,
            status.nodes,
            status.started,
            status.updated or status.started,
            str(status.state or "unknown"),
            "",
            job_id=status.job_id,
            world_size=status.world_size,
            step_start=progress.step_start,
            step_end=progress.step,
            submitted=status.submitted,
            goodput=status.goodput,
            slow_nodes=progress.stragglers,
        )
        attempts.append(current)
    config, hidden = shown_values(run)
    if curves is None:
        curves = CurveReader(lines.path_of(run)).read()
    return ReportFacts(
        run,
        told,
        tuple(attempts),
        figures,
        curves,
        config,
        hidden,
        _versions(run),
        tuple(_checkpoints(run)),
        why,
        row=row,
    )


def _checkpoints(run: RunDir) -> Iterator[CheckpointFacts]:
    """Yield the newest checkpoints. Their sizes are those of the files: a large manifest takes seconds to read."""
    with suppress(CheckpointError):  # the versions' warning says why
        for path in committed(run.checkpoints)[:MOST_CHECKPOINTS]:
            with suppress(OSError):  # it is being removed
                yield path.name, saved_at(path), _size(path, path.stat().st_mtime)


@lru_cache(maxsize=512)
def _size(path: Path, changed: float) -> int:
    return sum(file.stat().st_size for file in fsio.files_below(path))


@lru_cache(maxsize=64)
def _written_by(path: Path, saved: float) -> Mapping[str, Any]:
    """Return the versions of the packages that wrote a checkpoint."""
    if (path / manifest.NAME).stat().st_size >= _LARGEST_MANIFEST_BYTES:
        return {}
    return manifest.read(path).versions


def _versions(run: RunDir) -> dict[str, str]:
    """Return the versions of the sources, and of the packages that wrote the newest checkpoint."""
    found: dict[str, str] = {}
    note = records.read(run.code / "SNAPSHOT.json", SnapshotNote)
    if note is not None and note.git_sha:
        found["sources"] = f"{note.git_sha[:12]}{', with changes' if note.dirty else ''}"
    if run.code_number > 1:
        found["copy of the sources"] = str(run.code_number)
    try:
        for folder in committed(run.checkpoints)[:1]:
            versions = _written_by(folder, folder.stat().st_mtime)
            found |= {name: str(version) for name, version in sorted(versions.items())}
    except (OSError, CheckpointError) as error:
        log.warning("%s", error)
    return found
