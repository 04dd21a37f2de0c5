"""What runs take on the disk, and how to get it back."""

from toolkit.registry import Plugin

PLUGIN = Plugin("disk", commands={"rm": "toolkit.plugins.disk.rm", "gc": "toolkit.plugins.disk.gc"})
