"""Checks whether a node sees the same shared folder as the others.

It also checks for room where a run writes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from pathlib import Path

from toolkit.base import fsio
from toolkit.plugins.site.checks import Finding, ok

#: With NFS a node may see a new file this much later than the node that wrote it.
SEEN_WITHIN_S = 3.0
#: The file with the caller's token.
TOKEN = "token"
#: The figure of a shared folder that is the same here.
SAME = "same"
#: Free bytes and inodes below which a run cannot go on, and below which it cannot go on for long.
BAD_BYTES, WARNING_BYTES = 100 * 2**20, 2**30
BAD_INODES, WARNING_INODES = 100, 10_000


def check_shared(folder: Path, token: str, node: str, within_s: float = SEEN_WITHIN_S) -> Finding:
    """Check that the caller's token can be read in ``folder``, and leave an answer there.

    The caller reads the answer.
    """
    wrong = _reading(folder, token, within_s)
    if wrong is None:
        try:
            fd = os.open(folder / node, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                os.write(fd, token.encode())
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            wrong = f"{folder.parent}: cannot be written to ({_words(error)}){_advice(error)}"
    return ok("shared folder", SAME) if wrong is None else Finding("shared folder", "bad", "bad", wrong)


def read_soon(path: Path, wanted: str, within_s: float = SEEN_WITHIN_S) -> str | None:
    """Return the text of ``path`` when it is ``wanted``, at the latest after ``within_s``.

    Returns None if there is no such file. Raises OSError for all other errors.
    """
    deadline = time.monotonic() + within_s
    while True:
        try:
            text = path.read_text(errors="replace")
        except FileNotFoundError:
            text = None
        if text == wanted or time.monotonic() >= deadline:
            return text
        time.sleep(0.02)


def _reading(folder: Path, token: str, within_s: float) -> str | None:
    """Return what is wrong with the token in ``folder``, None if it can be read."""
    try:
        text = read_soon(folder / TOKEN, token, within_s)
    except OSError as error:
        return f"{folder.parent}: cannot be read ({_words(error)}){_advice(error)}"
    if text is None:
        # Tell a missing mount from a file that does not appear on a folder of the same name.
        with contextlib.suppress(OSError):
            if not folder.parent.is_dir():
                return f"{folder.parent} does not exist here: its file system is not mounted; have it mounted"
        return (
            f"{folder.parent} is another folder here than on the batch host, or a stale one: what was written there is "
            f"not seen within {within_s:g} s; have its file system mounted anew"
        )
    if text != token:
        return f"{folder / TOKEN} has other content here than on the batch host; have its file system mounted anew"
    return None


def _words(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else str(error)


def _advice(error: OSError) -> str:
    advice = {
        errno.ESTALE: ": the handle is stale; have its file system mounted anew",
        errno.EROFS: ": it is mounted read-only here; have it mounted for writing",
        errno.ENOSPC: ": it is full; make room, or set TOOLKIT_RUNS to another folder",
        errno.EDQUOT: ": your quota is used up; make room, or set TOOLKIT_RUNS to another folder",
    }
    return advice.get(error.errno or 0, "; have the node looked at, or set TOOLKIT_RUNS to another folder")


def check_space(check: str, path: Path) -> Finding:
    """Check the free space and inodes where ``path`` lies."""
    try:
        stat = os.statvfs(path)
    except OSError as error:
        return Finding(check, "bad", "?", f"{path}: {_words(error)}{_advice(error)}")
    free, inodes = stat.f_bavail * stat.f_frsize, stat.f_favail
    counted = stat.f_files > 0  # a file system such as btrfs makes inodes on demand
    figure = fsio.size_text(free)
    there = f"{path} has {figure} and {inodes if counted else 'enough'} inodes free"
    if free < BAD_BYTES or (counted and inodes < BAD_INODES):
        return Finding(check, "bad", figure, f"{there}: it is full; make room, or choose another folder")
    if free < WARNING_BYTES or (counted and inodes < WARNING_INODES):
        return Finding(check, "warning", figure, f"{there}: it is nearly full; make room")
    return ok(check, figure)
