"""Starts programs that do not outlive this process, see :mod:`toolkit.agent.die_with_parent`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from toolkit import fsio
from toolkit.agent import die_with_parent


def start_child(
    command: Sequence[str],
    environ: Mapping[str, str],
    *,
    end_by: signal.Signals,
    ignore_signals: bool = False,
    **options: Any,
) -> subprocess.Popen[Any]:
    """Start ``command`` in a session of its own. It gets the signal ``end_by`` when this process dies in any way.

    ``ignore_signals``: from its first moment it ignores those that Slurm sends to all processes of a job that is to
    end. ``options`` are those of Popen.
    """
    handling = die_with_parent.IGNORE if ignore_signals else die_with_parent.DEFAULT
    prefix = [sys.executable, "-I", "-S", die_with_parent.__file__, str(os.getpid()), end_by.name, handling]
    return subprocess.Popen([*prefix, *command], env=dict(environ), start_new_session=True, **options)


def open_log(path: Path) -> IO[bytes]:
    """Open a log file to append to, private to the user."""
    fsio.make_dir(path.parent, parents=0)
    return os.fdopen(fsio.open_private(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab")
