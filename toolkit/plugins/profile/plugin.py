"""`toolkit profile`, and the trace of each step that `toolkit resume-check` compares."""

from toolkit.registry import Plugin

PLUGIN = Plugin(
    "profile",
    commands={"profile": "toolkit.plugins.profile.command"},
    hooks={"profile": "toolkit.plugins.profile.recording:StepProfile", "trace": "toolkit.plugins.profile.trace:start"},
)
