"""Checks the values that `toolkit set` gives a run, as a config's values are checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toolkit import config as configs
from toolkit.base.errors import ConfigError, RequestError, nearest
from toolkit.config.schema import set_values
from toolkit.files.rundir import RunDir
from toolkit.run.prepare.run_keys import acting_on
from toolkit.run.records import changes, run_config
from toolkit.run.records.changes import LIVE


def checked(run: RunDir, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the values by key. Raises ConfigError for a key that cannot be set now, or a value that does not fit."""
    if not overrides:
        raise RequestError(f"set: say what, as in `toolkit set {run.id} optim.lr=0.01`; keys: {', '.join(LIVE)}")
    now = run_config.in_force(run)
    acting = acting_on(run, now.job, now.argv)
    keys = [override.partition("=")[0] for override in overrides]
    for key in keys:
        if now.job == configs.FOREIGN_JOB:
            raise ConfigError(f"run {run.id} is a script under `toolkit exec`: it does not read the toolkit's keys")
        if key not in configs.all_keys() and not key.startswith("params."):
            raise ConfigError(f"unknown key {key!r}; {nearest(key, LIVE)}these can be set: {', '.join(LIVE)}")
        if key not in LIVE:
            raise ConfigError(
                f"{key} cannot be set while the run trains: after `toolkit stop {run.id}`, `toolkit resume {run.id} "
                f"{key}=...` goes on with another value, unless it is fixed. These can: {', '.join(LIVE)}"
            )
        if not acting.include_by_toolkit(key):
            raise ConfigError(
                f"{key}: run {run.id} has a loop of its own, which does not read it while it trains. "
                f"These can be set: {', '.join(filter(acting.include_by_toolkit, LIVE))}"
            )
    # Read them as overrides of the config, which checks their types.
    then = configs.load_config(run.config, overrides, site=False)
    values = {key: configs.value_of(then, key) for key in keys}
    # Check them together with what the ranks have now, which is not what the file says.
    set_values(now, values)
    configs.validate(now, login_node=False, project=run.code.resolve(), goes_on=True)
    return values


def text(values: Mapping[str, Any]) -> str:
    """Return the values as a config writes them."""
    return ", ".join(f"{key}={changes.written(value)}" for key, value in values.items())
