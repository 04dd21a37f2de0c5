"""The search for slow GPUs before a job's first attempt."""

from toolkit.registry import Plugin

PLUGIN = Plugin("gpu_speeds", hooks={"slow_gpus": "toolkit.plugins.gpu_speeds.compare:slow_nodes"})
