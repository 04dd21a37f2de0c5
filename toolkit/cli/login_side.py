"""What `toolkit --on LOGIN` does on the login node: take the project's files, and go to them."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import select
import shutil
import signal
import sys
import tarfile
import tempfile
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from toolkit import __version__
from toolkit.base import fsio, terminal
from toolkit.base.errors import RequestError
from toolkit.run.prepare import snapshot

#: Begins the name of the folder of files that have arrived, until all have.
_ARRIVING = ".toolkit-arriving-"


def accept_request(request: str) -> list[str] | None:
    """Go to the project's folder and return the words of the command; None where only files were sent."""
    asked = json.loads(base64.urlsafe_b64decode(request))
    login = asked["login"]
    if asked["token"]:
        print(f"\n{asked['token']}", flush=True)  # what a login's shell has printed may lack its newline
    if asked["version"] != __version__:
        raise RequestError(
            f"{login} has toolkit {__version__}, the laptop {asked['version']}: `toolkit site init --on {login}` "
            f"brings "
            "that version there; or install this one on the laptop"
        )
    folder = fsio.make_dir(fsio.expand(asked["folder"])).resolve()
    os.chdir(folder)
    if "words" not in asked:  # the end of stdin tells that the connection has ended
        _receive(folder)
        return None
    if asked["token"]:
        threading.Thread(target=_end_without_reader, daemon=True).start()
    if asked["sent"]:
        snapshot.EXPECTED[folder] = asked["sent"]
        with snapshot.uploads_locked(folder):  # a script of `exec` is not copied later
            pass
    sys.argv[0] = "toolkit"
    # The environment is not activated, and `python` is to be its own.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    terminal.set_laptop_login(login)
    words: list[str] = asked["words"]
    return words


def _end_without_reader() -> None:
    """End this process as a terminal that goes away ends it: without one ssh leaves a command behind that is silent."""
    poll = select.poll()
    poll.register(1, 0)  # an error is reported without being asked for
    poll.poll()
    os.kill(os.getpid(), signal.SIGHUP)


def digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Return what each file or link is: a link's target, or the content's digest and whether it is a program."""
    found = {}
    for name in names:
        path = folder / name
        if path.is_symlink():
            found[name] = f"link to {path.readlink()}"
        elif path.is_file():
            kind = "program" if path.stat().st_mode & 0o100 else "file"
            found[name] = f"{kind} {hashlib.sha256(fsio.read_bytes(path, fsio.LONG_BYTES)).hexdigest()}"
    return found


def _receive(folder: Path) -> None:
    """Print what the files sent before are now, and put those in place that come on stdin, once all have come.

    Files that were not sent, such as a script's outputs, stay. Those are removed that the project has no more.
    """
    print(json.dumps(digests(folder, snapshot.names_sent(folder))), flush=True)
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=_ARRIVING) as temporary:
            arriving = Path(temporary)
            with tarfile.open(fileobj=sys.stdin.buffer, mode="r|gz") as archive:
                # Python 3.11.3, as in Debian 12, has no filters. What comes is the user's own, through their own ssh.
                options: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
                archive.extractall(arriving, **options)
            if not (arriving / snapshot.SENT).exists():
                raise EOFError
            with snapshot.uploads_locked(folder):
                _put_in_place(arriving, folder)
    except (tarfile.ReadError, EOFError):
        raise RequestError(f"{folder}: the connection ended before all files had arrived") from None
    except OSError as error:
        path = error.filename2 or error.filename or folder
        raise RequestError(f"{path}: {error.strerror or error}; not all files are in place there") from None


def _put_in_place(arriving: Path, folder: Path) -> None:
    names, before = snapshot.names_sent(arriving), snapshot.names_sent(folder)
    arrived = digests(arriving, names)
    if digests(folder, names) | arrived != json.loads(fsio.read_text(arriving / snapshot.SENT)):
        raise RequestError(f"{folder}: files there have changed while others came; try again")
    for name in {*before} - {*names}:
        (folder / name).unlink(missing_ok=True)
        # A file may have the name of the folder now. What a script has written keeps its folder.
        shutil.rmtree((folder / name).parent / "__pycache__", ignore_errors=True)
        with suppress(OSError):
            os.removedirs((folder / name).parent)
    for name in (*arrived, snapshot.SENT):
        fsio.make_dir((folder / name).parent)
        (arriving / name).replace(folder / name)
