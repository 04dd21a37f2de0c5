"""The warning of loops that number their steps in a way that a resume breaks."""

from toolkit.registry import Plugin

PLUGIN = Plugin("counted_steps", hooks={"check_source": "toolkit.plugins.counted_steps.loops:warn_of_counting"})
