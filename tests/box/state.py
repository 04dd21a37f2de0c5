"""The folders of running boxes, their owners, and the removal of dead owners' remains.

`<cache>/boxes/<name>/` belongs to the process that holds the lock on its `owner` file. The kernel drops the lock when
that process dies, however it dies; a folder whose lock is free is therefore the remains of a crash.
"""

import contextlib
import fcntl
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from tests.box.errors import BoxError
from tests.box.namespaces import all_pids, find_inits, remove_cgroups, wait_for
from tests.box.roots import cache_dir, locked


def boxes_dir() -> Path:
    folder = cache_dir() / "boxes"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def claim(name: str) -> tuple[Path, TextIO]:
    """Make the folder of a new box. The open file keeps it ours until it is closed or we die."""
    with locked(boxes_dir() / ".lock"):
        box_dir = boxes_dir() / name
        if box_dir.exists():
            raise BoxError(f"a box {name} stands already; its owner is process {owner_pid(box_dir)}")
        box_dir.mkdir()
        owner = (box_dir / "owner").open("w")
        fcntl.flock(owner, fcntl.LOCK_EX)
        owner.write(str(os.getpid()))
        owner.flush()
    return box_dir, owner


def release(box_dir: Path, owner: TextIO) -> None:
    """The opposite of claim, for a box whose machines are dead."""
    _remove(box_dir)
    owner.close()


def sweep() -> list[str]:
    """End and remove the remains of boxes with dead owners; return their names."""
    swept = []
    with locked(boxes_dir() / ".lock"):
        for box_dir in _box_dirs():
            if owner_pid(box_dir) is None:
                _end_machines(box_dir)
                _remove(box_dir)
                swept.append(box_dir.name)
    return swept


def owned() -> dict[str, int]:
    """Name -> pid of the owner, of the boxes that stand."""
    pids = {box_dir.name: owner_pid(box_dir) for box_dir in _box_dirs()}
    return {name: pid for name, pid in pids.items() if pid is not None}


def owner_pid(box_dir: Path) -> int | None:
    """The living process that holds this box, or None."""
    with contextlib.suppress(FileNotFoundError), (box_dir / "owner").open("r+") as owner:
        try:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return int(owner.read() or 0)
    return None


def _box_dirs() -> Iterator[Path]:
    return (path for path in sorted(boxes_dir().iterdir()) if path.is_dir())


def _end_machines(box_dir: Path) -> None:
    """End the inits; the kernel then ends the rest of each machine."""
    for pid in (inits := find_inits(box_dir)).values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not set(inits.values()) & set(all_pids()), 10, f"the machines of {box_dir.name} to end")


def _remove(box_dir: Path) -> None:
    remove_cgroups(box_dir.name)
    shutil.rmtree(box_dir)
