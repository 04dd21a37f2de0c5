"""Sweeps: many runs of one config with other values, looked after by one name."""

from toolkit.registry import Plugin

PLUGIN = Plugin(
    "sweep",
    commands={"sweep": "toolkit.plugins.sweep.command"},
    hooks={
        "sweep_rows": "toolkit.plugins.sweep.rows",
        "named_runs": "toolkit.plugins.sweep.names:named_runs",
        "unfinished_points": "toolkit.plugins.sweep.states:unfinished_points",
        "withdraw_retry": "toolkit.plugins.sweep.again:withdraw_retry",
        "may_start_again": "toolkit.plugins.sweep.states:may_start_again",
        "watch_attempt": "toolkit.plugins.sweep.halving:Halving",
    },
)
