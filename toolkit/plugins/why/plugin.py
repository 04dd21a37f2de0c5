"""Why a job ended: `toolkit why`, and the cause on other pages."""

from toolkit.registry import Plugin

PLUGIN = Plugin(
    "why",
    commands={"why": "toolkit.plugins.why.command"},
    hooks={
        "cause_of_end": "toolkit.plugins.why.runs:cause_of",
        "recurs": "toolkit.plugins.why.runs:recurs",
    },
)
