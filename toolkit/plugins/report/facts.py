"""What a report says about a run, from the run's own files. No text of the environment is in it but versions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from toolkit.base import logs
from toolkit.base.errors import CheckpointError
from toolkit.checkpoint import manifest
from toolkit.checkpoint.folder import committed
from toolkit.cli import run_facts
from toolkit.files import records
from toolkit.files.run_files import AttemptRecord, SweepPoint
from toolkit.files.rundir import RunDir
from toolkit.metrics import lines
from toolkit.plugins.report.curves import Curve, read_curves
from toolkit.run.prepare.run_keys import shown_values
from toolkit.run.prepare.snapshot import SnapshotNote

#: What of `toolkit why` may leave the run folder: no lines of logs.
_TOLD = (
    *("run", "state", "why", "cause", "diagnosis", "next", "loss", "last_checkpoint", "step_reached", "steps_lost"),
    *("nodes", "ailing_nodes", "bad_nodes", "stragglers", "goodput", "start_up", "efficiency"),
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


def facts_of(run: RunDir) -> ReportFacts:
    """Return the facts about ``run``. Raises DamagedFileError where a file of it cannot be read."""
    told = run_facts.facts(run)
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
    curves = read_curves(lines.path_of(run))
    config, hidden = shown_values(run)
    return ReportFacts(run, told, tuple(attempts), figures, curves, config, hidden, _versions(run))


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
            if (folder / manifest.NAME).stat().st_size < _LARGEST_MANIFEST_BYTES:
                versions = manifest.read(folder).versions
                found |= {name: str(version) for name, version in sorted(versions.items())}
    except (OSError, CheckpointError) as error:
        log.warning("%s", error)
    return found
