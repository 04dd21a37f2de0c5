"""`train.pruning`: weights that become 0 and stay 0."""

from toolkit.registry import Plugin

PLUGIN = Plugin("pruning", hooks={"prune": "toolkit.plugins.pruning.pruning:Pruning"})
