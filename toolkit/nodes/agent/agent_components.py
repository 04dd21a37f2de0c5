"""All that an agent may have besides the ranks of its node. Each part helps them, and none can end the agent."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from toolkit.base.best_effort import best_effort_part
from toolkit.nodes.agent.helpers import Helpers
from toolkit.nodes.agent.messages import Message
from toolkit.nodes.agent.processes import Processes

if TYPE_CHECKING:
    from toolkit.plugins.node_watch.node_monitor import MonitorProcess
    from toolkit.plugins.staging.node_side import CopyKeeper


@best_effort_part
def node_monitor(helpers: Helpers, send: Callable[[Message], None]) -> MonitorProcess:
    """Return what measures the node while ranks work, and sends what makes it sick."""
    from toolkit.plugins.node_watch.node_monitor import MonitorProcess

    return MonitorProcess(helpers, send)


@best_effort_part
def file_stager(helpers: Helpers, processes: Processes, send: Callable[[Message], None]) -> CopyKeeper:
    """Return what makes copies of shared files on this node."""
    from toolkit.plugins.staging.node_side import CopyKeeper

    return CopyKeeper(helpers, processes, send)
