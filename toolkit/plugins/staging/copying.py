"""Copies packages to a disk of this node, and keeps them while the agent lives.

:mod:`.relay` uses it. Two jobs on a node share a copy: one unpacks it, and the other waits. A copy gets its name when
all of it is unpacked and the package was whole. While a process uses it, three things are locked: a file, for the jobs
that share it; the copy's folder, in case that file was removed; and the folder of all copies, which systemd-tmpfiles
then leaves alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import IO

from toolkit.base import fsio, trust
from toolkit.base.errors import RequestError
from toolkit.files.json_record import JsonRecord
from toolkit.plugins.staging import room
from toolkit.plugins.staging.package import BLOCK_BYTES, Package, StagingError, SummedFile
from toolkit.plugins.staging.whole import OWN_FOLDER, is_whole, mark

#: A copy that no job has used for this long is removed. systemd removes single files of /tmp after ten days.
UNUSED_S = 7 * 86_400.0
#: A small file takes a block of the disk.
FILE_BYTES = 4096
PROGRAM_TIMEOUT_S = 60
#: Jobs that look for a copy at the same moment are through by then.
OTHERS_WAIT_S = 5.0

#: Yields the bytes of a package, in blocks, for a copy in the folder.
Source = Callable[[Package, Path], Iterator[bytes]]


class DamagedPackageError(StagingError):
    """A package that does not hold what was packed."""


@dataclass(frozen=True)
class CopyRequest(JsonRecord):
    """What to copy. ``stage_dir``: the only folder for it; None: the best of this node's."""

    packages: tuple[Package, ...]
    stage_dir: str | None = None
    nice: int = 0


@dataclass(frozen=True)
class Copy:
    """A copy on this node. ``locks`` are open files: as long as they are open the copy stays."""

    path: Path
    locks: tuple[int, ...]
    is_new: bool


def from_disk(package: Package, position: int = 0) -> Iterator[bytes]:
    """Yield the bytes of ``package`` from ``position`` on. Raises OSError."""
    with Path(package.file).open("rb", buffering=0) as file:
        file.seek(position)
        while data := file.read(BLOCK_BYTES):
            yield data


def copy(package: Package, folders: list[Path], source: Source = lambda package, own: from_disk(package)) -> Copy:
    """Find a copy of ``package``, or make one, in the first of ``folders`` with room.

    Raises StagingError, which names each folder and the reason against it; DamagedPackageError; OSError.
    """
    reasons: list[str] = []
    for folder in folders:
        try:
            own = _own_folder(folder)
            with _locked_folder(own, fcntl.LOCK_SH) as lock:
                found = _find(own, package) or _make(own, package, source)
                return replace(found, locks=(*found.locks, os.dup(lock)))
        except DamagedPackageError:
            raise
        except StagingError as error:
            reasons.append(str(error))
        except OSError as error:
            if str(error.filename) == package.file:
                raise  # the package cannot be read, whatever the disk
            reasons.append(f"{folder}: {error.strerror or error}")
    raise StagingError("; ".join(reasons) or "this node has no folder of its own for copies")


def _find(own: Path, package: Package) -> Copy | None:
    """Return the copy that is there. Wait for a job that unpacks it at this moment."""
    with _locked(own / f"{package.key}.lock", fcntl.LOCK_SH) as lock:
        if not (own / package.key).is_dir():
            return None
        with _locked_folder(own / package.key, fcntl.LOCK_SH) as folder:  # first: nothing is removed from then on
            if not is_whole(own, package.key):
                return None
            os.utime(own / f"{package.key}.json")  # its last use
            return Copy(_place(own, package), (os.dup(lock), os.dup(folder)), is_new=False)


def _make(own: Path, package: Package, source: Source) -> Copy:
    deadline = time.monotonic() + OTHERS_WAIT_S
    while True:
        try:
            with _locked(own / f"{package.key}.lock", fcntl.LOCK_EX | fcntl.LOCK_NB) as lock:
                is_new = not is_whole(own, package.key)
                if is_new:
                    _make_room(own, package)
                    _unpack(package, own, source)
                fcntl.flock(lock, fcntl.LOCK_SH)
                with _locked_folder(own / package.key, fcntl.LOCK_SH) as folder:
                    return Copy(_place(own, package), (os.dup(lock), os.dup(folder)), is_new)
        except BlockingIOError:
            # Another job looks for the copy as well, or makes it by now. Or it uses one that was damaged.
            if found := _find(own, package):
                return found
            if time.monotonic() >= deadline:
                raise StagingError(f"{own / package.key} is not whole, and another job uses it") from None
            time.sleep(0.02)


def _place(own: Path, package: Package) -> Path:
    return own / package.key if package.is_archive else own / package.key / PurePath(package.source).name


def _own_folder(folder: Path) -> Path:
    """Return this user's folder in one that other users may write to as well. Raises StagingError."""
    own = folder / f"{OWN_FOLDER}{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        fsio.make_new_dir(own)
    status = own.lstat()
    # Programs run from there: another user's folder, or a link, is not to be trusted.
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise StagingError(f"{own} is not a folder that only this user can write to; remove it")
    try:
        trust.refuse_of_others(own, "copies")  # through a folder above they could replace it as well
    except RequestError as error:
        raise StagingError(str(error)) from error
    if os.statvfs(own).f_flag & os.ST_NOEXEC:
        raise StagingError(f"{folder} is mounted noexec: no library can be loaded from there")
    return own


# ------------------------------------------------------------------------------------------------------- one at a time


@contextlib.contextmanager
def _locked(path: Path, operation: int) -> Iterator[int]:
    """Hold the lock ``path``; it ends with the block, or with this process. Raises BlockingIOError."""
    while True:
        lock = fsio.open_private(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, operation)
            # The process that held the lock may have removed the file: then others lock another one.
            if _is_same_file(lock, path):
                os.utime(lock)  # a cleaner removes what is old
                break
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)
    try:
        yield lock
    finally:
        os.close(lock)


@contextlib.contextmanager
def _locked_folder(path: Path, operation: int) -> Iterator[int]:
    """Hold a folder's own lock. Raises BlockingIOError."""
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, operation)
        yield lock
    finally:
        os.close(lock)


def _is_same_file(opened: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(opened), path.stat())
    except FileNotFoundError:
        return False


def needed_bytes(package: Package) -> int:
    """Return how much room a copy takes."""
    return package.bytes + package.files * FILE_BYTES


def _make_room(own: Path, package: Package) -> None:
    """Remove other copies until there is room for this one.

    What is left of this copy, and copies that are long unused, are removed in any case. Raises StagingError if there is
    still too little room.
    """
    _remove(own, package.key)
    needed = needed_bytes(package)
    last_use = {record.stem: record.stat().st_mtime for record in own.glob("*.json")}
    for lock in own.glob("*.lock"):
        last_use.setdefault(lock.stem, 0.0)  # of a job that died while it unpacked
    del_before = time.time() - UNUSED_S
    for key in sorted(last_use.keys() - {package.key}, key=lambda key: last_use[key]):
        if last_use[key] > del_before and room.room_bytes(own) >= needed:
            break
        with contextlib.suppress(BlockingIOError), _locked(own / f"{key}.lock", fcntl.LOCK_EX | fcntl.LOCK_NB):
            _remove(own, key)
            (own / f"{key}.lock").unlink()
    free = room.room_bytes(own)
    if free < needed:
        raise StagingError(f"{own.parent} has room for {fsio.size_text(free)}, and {fsio.size_text(needed)} are needed")


def _remove(own: Path, key: str) -> None:
    """Remove a copy and what is left of one. Raises BlockingIOError if a job uses it, whose lock file was removed."""
    with contextlib.ExitStack() as stack:
        if (own / key).is_dir():
            stack.enter_context(_locked_folder(own / key, fcntl.LOCK_EX | fcntl.LOCK_NB))
        (own / f"{key}.json").unlink(missing_ok=True)  # first: without it no job takes the rest for whole
        fsio.remove_tree(own / key)
    fsio.remove_tree(own / f"{key}.partial")
    # What a kill in the middle of writing the record has left; the holder of the key's lock is its only writer.
    for left in own.glob(f".{key}.json.tmp-*"):
        left.unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------------------- unpacking


class _BlockFile:
    """A file of blocks. A read returns one."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks

    def read(self, size: int) -> bytes:
        return next(self._blocks, b"")


def _unpack(package: Package, own: Path, source: Source) -> None:
    partial, copied = own / f"{package.key}.partial", own / package.key
    try:
        fsio.make_new_dir(partial)
        summed = SummedFile(_BlockFile(source(package, own)))  # type: ignore[arg-type]
        try:
            _extract(summed, partial, package)
        except (tarfile.TarError, ValueError) as error:
            raise DamagedPackageError(f"{package.file} is damaged: {error}") from error
        # What follows the archive's end belongs to the sum.
        while summed.read(BLOCK_BYTES):
            pass
        if (summed.size_bytes, summed.crc) != (package.size_bytes, package.crc):
            raise DamagedPackageError(f"{package.file} is damaged, or was changed: it does not have its digest")
        if package.program is not None:
            _point_scripts(partial, package, copied)
        fsio.rename_dir(partial, copied)
        if package.program is not None:
            # Refuse an environment whose Python does not find its own packages in the copy.
            program = copied / package.program
            command = [str(program), "-I", "-c", "import sys; print(sys.prefix)"]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_TIMEOUT_S, check=False)
            except (OSError, subprocess.TimeoutExpired) as error:
                raise StagingError(f"the copied Python cannot be started: {error}") from error
            if done.stdout.strip() != str(copied):
                raise StagingError(
                    f"the copied Python does not work from {copied}: {(done.stderr or done.stdout).strip()[-200:]}"
                )
        fsio.write_json(own / f"{package.key}.json", mark(copied), durable=False)
    except BaseException:
        _remove(own, package.key)
        raise


def _extract(summed: SummedFile, folder: Path, package: Package) -> None:
    if not package.is_archive:
        target = folder / PurePath(package.source).name
        _write(target, summed, fsio.FILE_MODE, package.mtime_ns)  # type: ignore[arg-type]
        return
    with tarfile.open(fileobj=summed, mode="r|", bufsize=BLOCK_BYTES) as tar:  # type: ignore[call-overload]
        for member in tar:
            parts = PurePath(member.name).parts
            if ".." in parts or member.name.startswith("/"):
                raise ValueError(f"it holds {member.name!r}")
            target = folder / member.name
            if member.isdir():
                fsio.make_new_dir(target)
            elif member.issym():
                target.symlink_to(member.linkname)
            else:
                content = tar.extractfile(member)
                assert content is not None
                mode = 0o700 if member.mode & stat.S_IXUSR else fsio.FILE_MODE
                _write(target, content, mode, int(member.mtime) * 10**9)


def _write(path: Path, content: IO[bytes], mode: int, mtime_ns: int) -> None:
    with os.fdopen(fsio.open_private(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        while data := content.read(BLOCK_BYTES):
            file.write(data)
    os.utime(path, ns=(time.time_ns(), mtime_ns))  # cleaners remove what was not read for long


def _point_scripts(partial: Path, package: Package, copied: Path) -> None:
    """Have the scripts of an environment start its copied Python. Their first line has the original's path."""
    assert package.program is not None
    folder = (partial / package.program).parent
    old, new = f"#!{package.source}/".encode(), f"#!{copied}/".encode()
    for script in folder.iterdir():
        if script.is_symlink() or not script.is_file():
            continue
        status = script.stat()
        with script.open("rb") as file:
            if file.read(len(old)) != old:
                continue
            rest = file.read()
        script.write_bytes(new + rest)
        os.utime(script, ns=(status.st_atime_ns, status.st_mtime_ns))


def hold(locks: list[int]) -> None:
    """Become a small program that keeps the locks until the agent ends. This process dies with the agent."""
    for lock in locks:
        os.set_inheritable(lock, True)
    program = shutil.which("sleep")
    while program is None:
        time.sleep(86_400)
    os.execv(program, ["sleep", "infinity"])
