"""What a site is like: its checks, its defaults, the proof that runs come back there."""

from toolkit.registry import Plugin

PLUGIN = Plugin(
    "site",
    commands={
        "env": "toolkit.plugins.site.commands.env",
        "doctor": "toolkit.plugins.site.commands.doctor",
        "init": "toolkit.plugins.site.commands.init",
        "resume-check": "toolkit.plugins.site.commands.resume_check",
    },
    hooks={
        "check_nodes": "toolkit.plugins.site.checks.preflight:mark_bad_nodes",
        "check_site": "toolkit.plugins.site.site_limits:check_site",
        "doubtful_nodes": "toolkit.plugins.site.node_history:doubtful_for",
        "note_faults": "toolkit.plugins.site.node_history:note",
        "script_lines": "toolkit.plugins.site.script_options:script_lines",
        "expedites": "toolkit.plugins.site.site_profile:expedites",
        "preempt_modes": "toolkit.plugins.site.site_profile:preempt_modes",
    },
)
