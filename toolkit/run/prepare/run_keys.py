"""Which keys of its config act on a run that is there, by the sources that it runs."""

from __future__ import annotations

from collections.abc import Sequence

from toolkit.config.script_keys import ActingKeys, acting_keys
from toolkit.files.rundir import RunDir
from toolkit.run.prepare import snapshot
from toolkit.run.records import run_config


def acting_on(run: RunDir, job: str, argv: Sequence[str]) -> ActingKeys:
    """Return the keys that act on a run with this ``job`` and ``argv``. All do where its sources are not known."""
    folder = run.code.resolve() if run.code.is_dir() else snapshot.home_of(run.path)
    return ActingKeys() if folder is None else acting_keys(job, argv, folder)


def shown_values(run: RunDir) -> tuple[dict[str, str], dict[str, str]]:
    """Return what ``run_config.values_of`` does, without the keys that do not act on the run."""
    values, hidden = run_config.values_of(run.config)
    config = run_config.read(run)
    acting = ActingKeys() if config is None else acting_on(run, config.job, config.argv)
    return {key: value for key, value in values.items() if acting.include(key)}, hidden
