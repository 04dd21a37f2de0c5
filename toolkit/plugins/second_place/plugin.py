"""`checkpoint.copy_to`: a second folder for a run's checkpoints, on another disk."""

from toolkit.registry import Plugin

PLUGIN = Plugin("second_place", hooks={"second_place": "toolkit.plugins.second_place.second_place:SecondPlace"})
