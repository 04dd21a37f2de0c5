"""Finds the processes of a rank that a stop signal is for.

A rank may be more than one process: `bash train.sh`, `python train.py | tee log`, `uv run`, a launcher. A signal for
all of them would end what the one that saves still needs.
"""

from __future__ import annotations

import signal
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path

from toolkit.base import proc_stat
from toolkit.base.proc_stat import ProcessStat

#: A shell runs its trap only when the program has ended that it waits for: that one is to get the signal as well.
SHELLS = {"sh", "bash", "dash", "ash", "busybox", "zsh", "ksh", "fish"}


def receivers(leader: int, number: signal.Signals) -> set[int]:
    """Return the processes of the session of ``leader``, and of those that descend from it, that are to get a signal.

    These are the ones that handle it, but not below another program that does: data workers, and what a launcher has
    started, are that program's. SIGTERM also ends the shells and wrappers above these. What would die of the signal
    while another process handles it does not get it, as a ``tee`` that is written to. If none handles it all get it.
    """
    stats = {int(path.name): stat for path in Path("/proc").glob("[0-9]*") if (stat := proc_stat.read(path.name))}
    children = defaultdict[int, list[int]](list)
    for pid, stat in stats.items():
        parent = stats.get(stat.parent)
        # One whose parent has ended is the agent's child.
        is_orphan = stat.session == leader and (parent is None or parent.session != leader)
        if pid != leader:
            children[leader if is_orphan else stat.parent].append(pid)

    def below(pid: int) -> tuple[set[int], bool]:
        """Return the processes at ``pid`` and below that are to get it, and whether one of them handles it."""
        handles = pid in stats and stats[pid].handles(number)
        if handles and not _is_shell(pid):
            return {pid}, True
        branches = [below(child) for child in children[pid]]
        branches = [branch for branch in branches if branch[1]] or branches
        return {pid}.union(*(pids for pids, _ in branches)), handles or any(handled for _, handled in branches)

    found, is_handled = below(leader)
    living = {pid for pid in found if pid in stats and not stats[pid].has_ended}
    if is_handled and number is not signal.SIGTERM:
        return {pid for pid in living if stats[pid].handles(number)}
    return living


def any_lives(pids: Collection[int]) -> bool:
    """True if one of the processes has not ended."""
    stats: list[ProcessStat | None] = [proc_stat.read(pid) for pid in pids]
    return any(stat is not None and not stat.has_ended for stat in stats)


def _is_shell(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/exe").readlink().name in SHELLS
    except OSError:  # it has ended
        return False
