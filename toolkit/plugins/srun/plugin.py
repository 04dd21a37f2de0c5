"""Ranks that srun starts: over MPI, and in containers of the site."""

from toolkit.registry import Plugin

PLUGIN = Plugin("srun", hooks={"launcher": "toolkit.plugins.srun.launcher:launcher"})
