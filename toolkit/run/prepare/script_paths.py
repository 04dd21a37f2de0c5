"""Which paths can be a part of a job's script. It is decided here only, before a run is made."""

from __future__ import annotations

import sys
from pathlib import Path

from toolkit.base import staged
from toolkit.base.errors import RequestError
from toolkit.config import is_one_line

#: Not in the folder for runs. ``%`` and ``\\`` are patterns to Slurm in the names of logs; ``:`` divides PYTHONPATH.
_RESERVED = "%\\:"


def refuse_unfit(runs: Path) -> None:
    """Raise RequestError where the path of a folder or of Python fits no job's script.

    The folders are ``runs``, for the runs, and the current one. All other characters are quoted where a shell or sbatch
    reads them. A line break would end an ``#SBATCH`` line.
    """
    for what, path, reserved, remedy in (
        ("the folder for runs", runs, _RESERVED, "choose another: set TOOLKIT_RUNS"),
        ("the current folder", Path.cwd(), "", "go to another one"),
        ("Python", staged.origin(sys.executable), "", "use one in another folder"),
    ):
        bad = next((char for char in str(path) if char in reserved or not is_one_line(char)), None)
        if bad is not None:
            raise RequestError(f"{what}: {str(path)!r} cannot be in a job's script, because of {bad!r}; {remedy}")
    # The folder for runs need not exist yet, but what exists above it must be a folder.
    try:
        there = next(path for path in (runs, *runs.parents) if path.exists())
        why = None if there.is_dir() else f"{there} is no folder"
    except OSError as error:  # for example, a name that is too long
        why = f"{str(runs)[:200]}: {error.strerror}"
    if why is not None:
        raise RequestError(f"the folder for runs: {why}; choose another: set TOOLKIT_RUNS")
