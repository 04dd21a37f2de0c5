"""`checkpoint.memory_every_steps`: copies of the state in the nodes' memory."""

from toolkit.registry import Plugin

PLUGIN = Plugin("memory", hooks={"state_copies": "toolkit.plugins.memory.copies:MemoryCopies"})
