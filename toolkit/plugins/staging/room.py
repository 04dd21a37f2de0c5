"""How much of a node's own disk copies may take."""

from __future__ import annotations

import os
from pathlib import Path

from toolkit.base import this_node

#: The types of file systems whose files are in the node's memory.
IN_MEMORY = {"tmpfs", "ramfs"}
#: The part of the available memory that copies may take.
MEMORY_SHARE = 0.5
#: The part of a disk that copies leave free for others.
LEFT_FREE = 0.05


def room_bytes(folder: Path) -> int:
    """Return how many bytes copies may take in ``folder``."""
    status = os.statvfs(folder)
    room = int(status.f_bavail * status.f_frsize - LEFT_FREE * status.f_blocks * status.f_frsize)
    if this_node.file_system(folder) in IN_MEMORY:
        room = min(room, int(MEMORY_SHARE * this_node.available_bytes()))
    return max(0, room)
