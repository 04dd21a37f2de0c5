"""Writes a failing rank's report, a JSON file in the logs of its attempt.

The supervisor finds the first failing rank by the times in these files, and ``toolkit why`` shows its traceback.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
import traceback
from pathlib import Path
from typing import Any

from toolkit.base import fsio
from toolkit.base.errors import EXIT_FAILED, MOST_CHARS, shortened
from toolkit.base.secret_values import masked
from toolkit.files import rundir


def write(error: BaseException, rank: int) -> None:
    """Write the error file of ``rank`` for ``error``, once.

    Writes nothing outside of a run, or for an exit with code 0. Secrets of the run are masked.
    """
    folder = os.environ.get(rundir.RUN_DIR_VARIABLE)
    if folder is None or (isinstance(error, SystemExit) and not error.code) or getattr(error, _WRITTEN, False):
        return
    report = {
        "rank": rank,
        "host": socket.gethostname(),
        "time": time.time(),
        "type": type(error).__name__,
        "message": shortened(masked(str(error))),
        "exit_code": getattr(error, "exit_code", EXIT_FAILED),
        "comes_again": getattr(error, "comes_again", False),
        # No part is so long that another one would be left out for it.
        "traceback": shortened(masked("".join(map(shortened, traceback.format_exception(error)))), 4 * MOST_CHARS),
        **_of_argparse(error),
    }
    attempt = os.environ.get("TOOLKIT_ATTEMPT", "1")
    path = rundir.RunDir(Path(folder)).error_file(int(attempt) if re.fullmatch("[0-9]{1,9}", attempt) else 1, rank)
    with contextlib.suppress(OSError):  # a full disk; the log has the same text
        fsio.make_dir(path.parent, parents=1)
        fsio.write_json(path, report)
        setattr(error, _WRITTEN, True)


def _of_argparse(error: BaseException) -> dict[str, Any]:
    """Return what argparse says of the script's arguments where it ends the script. It would say the same again."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)] if isinstance(error, SystemExit) else []
    for frame in frames:
        if frame.f_code.co_name == "error" and frame.f_globals.get("__name__") == "argparse":
            said = str(frame.f_locals.get("message"))
            return {"type": ARGUMENT_ERROR, "message": shortened(masked(said)), "comes_again": True}
    return {}


#: The type of an error file by which a script refuses its arguments.
ARGUMENT_ERROR = "ArgumentError"
#: Set on an exception whose file is written: a second one would have a later time, and the first failure is wanted.
_WRITTEN = "_toolkit_error_file"
