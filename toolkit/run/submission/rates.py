"""What the changed config of a resumed run makes of its learning rate, as far as its files tell."""

from __future__ import annotations

import contextlib
from typing import Any

from toolkit.base.errors import CheckpointError, ConfigError
from toolkit.checkpoint.folder import CheckpointFolder, committed
from toolkit.config.learning_rate import RateChange, rate_change_by
from toolkit.files.rundir import RunDir
from toolkit.run.records import run_config


def saved_rates(run: RunDir) -> tuple[int, Any]:
    """Return the step of the run's newest readable checkpoint, and the rates that it keeps. None: it keeps none."""
    with contextlib.suppress(CheckpointError):
        for path in committed(run.checkpoints):
            with contextlib.suppress(CheckpointError):
                manifest = CheckpointFolder(run.checkpoints).manifest(path, sizes=False)
                return manifest.step, manifest.meta.get("learning_rate")
    return 0, None


def changed_rate(run: RunDir, step: int, saved: Any) -> RateChange | None:
    """Return what is to be said of the rate with which the resumed ``run`` goes on from ``saved``, if anything."""
    try:
        return rate_change_by(saved, step, run_config.in_force(run), run.id)
    except (ConfigError, KeyError, TypeError, AttributeError):  # another version of the toolkit kept it
        return None
