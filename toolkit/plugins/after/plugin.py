"""`--after`: runs that wait until other runs, or sweeps, have completed."""

from toolkit.registry import Plugin

PLUGIN = Plugin(
    "after",
    hooks={
        "after": "toolkit.plugins.after.awaited",
        "wait_for_other_runs": "toolkit.plugins.after.waiting:wait_for_other_runs",
    },
)
