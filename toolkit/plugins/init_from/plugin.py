"""`model.init_from`: weights from a run, a checkpoint, or files of other programs."""

from toolkit.registry import Plugin

PLUGIN = Plugin("init_from", hooks={"initial_weights": "toolkit.plugins.init_from.weights:read_on_all_ranks"})
