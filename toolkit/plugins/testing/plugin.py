"""A Slurm in memory for tests, and faults on demand."""

from toolkit.registry import Plugin

PLUGIN = Plugin("testing", hooks={"faults": "toolkit.plugins.testing.faults:of_environment"})
