"""Jobs that outlive the loss of a node, their batch host's too."""

from toolkit.registry import Plugin

PLUGIN = Plugin(
    "spares",
    hooks={
        "watch_batch_host": "toolkit.plugins.spares.batch_host_watch:command",
        "dead_nodes": "toolkit.plugins.spares.dead_nodes:DeadNodes",
    },
)
