"""What a run logs beside the job's own figures: which ranks are slow, its attempts, and where its time went."""

from toolkit.registry import Plugin

PLUGIN = Plugin(
    "curves",
    hooks={
        "pace": "toolkit.plugins.curves.stragglers:RankPace",
        "run_history": "toolkit.plugins.curves.history:History",
    },
)
