"""Copies of the environment and of data on the nodes' own disks: `cluster.stage`, `data.stage`."""

from toolkit.registry import Plugin

PLUGIN = Plugin(
    "staging",
    hooks={
        "prepare_nodes": "toolkit.plugins.staging.supervisor_side:NodeStaging",
        "node_copies": "toolkit.plugins.staging.node_side:CopyKeeper",
    },
)
