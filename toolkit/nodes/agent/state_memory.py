"""The anonymous memory files in which a node's ranks keep their state.

The agent holds them, so they outlive the ranks; the kernel frees them with the agent. Two belong to the node, and
``FILES_A_RANK`` to each rank, by its local rank. They cost nothing until a rank writes there.
"""

from __future__ import annotations

import os
import resource

from toolkit.base import logs

#: Tells a rank the files of its node: ``PID:FD,FD,...``, descriptors of the agent.
VARIABLE = "TOOLKIT_STATE_MEMORY"
#: Tells a rank the path of its node's file for decoded images.
PIXEL_FILE = "TOOLKIT_PIXEL_MEMORY"
#: Two for what all ranks have in common, from which each rank of the node reads.
FILES_A_NODE = 2
#: Two for the rank's own state, and two for that of a rank on another node.
FILES_A_RANK = 4
#: Descriptors of the agent for all else.
_KEPT_FREE = 200

log = logs.get(__name__)


class NodeFiles:
    """The memory files of one node, held by its agent."""

    def __init__(self) -> None:
        self._files: list[int] = []
        self.pixel_file = f"/proc/{os.getpid()}/fd/{os.memfd_create('pixels')}"  #: the file for decoded images

    def hold(self, ranks: int) -> str:
        """Hold the files of that many ranks. Return the value of ``VARIABLE``, empty for too many."""
        wanted = FILES_A_NODE + FILES_A_RANK * ranks
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _KEPT_FREE
        if wanted > limit:
            log.warning("no state is kept in memory: %d ranks need %d open files of %d", ranks, wanted, limit)
            wanted = 0
        for file in self._files[wanted:]:
            os.close(file)
        del self._files[wanted:]
        while len(self._files) < wanted:
            self._files.append(os.memfd_create(f"state-{len(self._files)}"))
        return f"{os.getpid()}:{','.join(map(str, self._files))}" if wanted else ""


def paths_of(value: str) -> list[str]:
    """Return the paths of the files that a value of ``VARIABLE`` names, in their order."""
    pid, _, files = value.partition(":")
    return [f"/proc/{pid}/fd/{file}" for file in files.split(",") if file]
