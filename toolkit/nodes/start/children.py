"""Starts programs that do not outlive this process, see :mod:`toolkit.nodes.agent.die_with_parent`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from toolkit.base import fsio
from toolkit.nodes.agent import die_with_parent


def with_death_signal(command: Sequence[str], by: signal.Signals, *, ignore_signals: bool = False) -> list[str]:
    """Return ``command``, changed to get the signal ``by`` when this process dies for any reason.

    ``ignore_signals``: from its first moment it ignores those that Slurm sends to all processes of a job.
    """
    handling = die_with_parent.IGNORE if ignore_signals else die_with_parent.DEFAULT
    return [sys.executable, "-I", "-S", die_with_parent.__file__, str(os.getpid()), by.name, handling, *command]


def start_child(
    command: Sequence[str],
    environ: Mapping[str, str],
    *,
    end_by: signal.Signals,
    ignore_signals: bool = False,
    **options: Any,
) -> subprocess.Popen[Any]:
    """Start ``command`` in a session of its own; see :func:`with_death_signal`. ``options`` are those of Popen."""
    argv = with_death_signal(command, end_by, ignore_signals=ignore_signals)
    return subprocess.Popen(argv, env=dict(environ), start_new_session=True, **options)


def open_log(path: Path) -> IO[bytes]:
    """Open a log file to append to, private to the user."""
    fsio.make_dir(path.parent, parents=0)
    return os.fdopen(fsio.open_private(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab")
