"""Nodes that are near each other in the network get neighbouring ranks."""

from toolkit.registry import Plugin

PLUGIN = Plugin("topology", hooks={"node_order": "toolkit.plugins.topology.node_order:node_order"})
