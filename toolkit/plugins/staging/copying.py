"""``python -m toolkit.plugins.staging.copying``: copy packages to a disk of this node, and keep the copies.

It reads a :class:`CopyRequest` as JSON, prints ``{"copies", "problems", "damaged", "took_s"}``, and then holds the
locks of the copies until it is killed. With the word ``check`` it reads the copies by the paths of their originals, and
prints those that still have all their files: a cleaner of temporary files may have removed some.

Each copy has a folder, whose name is the package's key. The record ``whole.json`` is written last: without it nothing
there counts. Two jobs on a node share a copy: one unpacks it, and the other waits. A process that uses a copy has its
folder locked. No other job then changes it, and systemd-tmpfiles leaves it alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import stat
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import IO

from toolkit.base import fsio, logs, this_node, trust
from toolkit.base.errors import RequestError
from toolkit.base.process_limits import limits
from toolkit.files.records import FileRecord, JsonRecord
from toolkit.plugins.staging import archive as packages
from toolkit.plugins.staging.archive import BLOCK_BYTES, Archive, StagingError, SummedFile

#: Begins the name of a user's folder of copies on a disk of a node.
OWN_FOLDER = "toolkit-stage-"
#: In the folder of a copy: the copy, and the record that it is whole.
COPY, WHOLE = "copy", "whole.json"
#: A copy that no job has used for this long is removed. systemd removes single files of /tmp after ten days.
UNUSED_S = 7 * 86_400.0
#: A small file takes a block of the disk.
FILE_BYTES = 4096
PROGRAM_TIMEOUT_S = 60


class DamagedArchiveError(StagingError):
    """A package that does not hold what was packed."""


@dataclass(frozen=True)
class CopyRequest(JsonRecord):
    """What to copy. ``stage_dir``: the only folder for it; None: the best of this node's."""

    packages: tuple[Archive, ...]
    stage_dir: str | None = None
    nice: int = 0


@dataclass(frozen=True)
class CopyMark(FileRecord):
    """What a whole copy has. Its files may be empty after a crash of the node, so it is of one boot."""

    boot: str
    files: int
    bytes: int


@dataclass(frozen=True)
class Copy:
    """A copy on this node. ``lock`` is an open file: as long as it is open the copy stays."""

    path: Path
    lock: int
    is_new: bool


def copy(package: Archive, folders: list[Path]) -> Copy:
    """Find a copy of ``package``, or make one, in the first of ``folders`` with room.

    Raises StagingError, which names each folder and the reason against it; DamagedPackageError; OSError.
    """
    reasons: list[str] = []
    for disk in folders:
        try:
            return _copy_in(_own_folder(disk) / package.key, package)
        except DamagedArchiveError:
            raise
        except RequestError as error:
            reasons.append(str(error))
        except OSError as error:
            if str(error.filename) == package.file:
                raise  # the package cannot be read, whatever the disk
            reasons.append(f"{disk}: {error.strerror or error}")
    raise StagingError("; ".join(reasons) or "this node has no folder of its own for copies")


def _own_folder(disk: Path) -> Path:
    """Return this user's folder on a disk that other users may write to as well. Raises RequestError."""
    own = disk / f"{OWN_FOLDER}{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        fsio.make_new_dir(own)
    status = own.lstat()
    # Programs run from there: another user's folder, or a link, is not to be trusted.
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise StagingError(f"{own} is not a folder that only this user can write to; remove it")
    trust.refuse_untrusted(own, "copies")  # through a folder above they could replace it as well
    if os.statvfs(own).f_flag & os.ST_NOEXEC:
        raise StagingError(f"{disk} is mounted noexec: no library can be loaded from there")
    return own


def _copy_in(folder: Path, package: Archive) -> Copy:
    """Find the copy in ``folder``, or make it. Wait for a job that makes it at this moment."""
    deadline, is_new = time.monotonic() + limits().other_copiers_s, False
    while True:
        lock = _lock(folder, fcntl.LOCK_SH)
        if is_whole(folder):
            os.utime(folder / WHOLE)  # its last use
            path = folder / COPY
            return Copy(path if package.is_archive else path / PurePath(package.source).name, lock, is_new)
        os.close(lock)
        try:
            lock = _lock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # Another job looks for the copy as well, or is making it. Or it uses one that was damaged.
            if time.monotonic() >= deadline:
                raise StagingError(f"{folder} is incomplete, and another job uses it") from None
            time.sleep(0.02)
            continue
        try:
            if not is_whole(folder):
                _make(folder, package)
                is_new = True
        finally:
            os.close(lock)  # another job may remove the copy before it is locked again: then it is made once more


def _lock(folder: Path, operation: int) -> int:
    """Return ``folder``, which is made where it is not there, opened and locked. Raises BlockingIOError."""
    while True:
        with contextlib.suppress(FileExistsError):
            fsio.make_new_dir(folder)
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(lock, operation)
            # The process that held the lock may have removed the folder: then others lock another one.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), folder.stat()):
                    return lock
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


# ------------------------------------------------------------------------------------------------- whole, and its room


def is_whole(folder: Path) -> bool:
    """True if the copy is complete. After a crash of the node its files may be empty, so it must be of this boot."""
    return CopyMark.read_or_none(folder / WHOLE) == _mark(folder / COPY)


def _mark(copied: Path) -> CopyMark:
    """Return what a copy has now, without the compiled files that Python adds to it."""
    files = size_bytes = 0
    for folder, folders, names in os.walk(copied):
        if "__pycache__" in folders:
            folders.remove("__pycache__")
        files += len(folders) + len(names)
        size_bytes += sum(os.lstat(f"{folder}/{name}").st_size for name in names)
    return CopyMark(Path("/proc/sys/kernel/random/boot_id").read_text().strip(), files, size_bytes)


def _make_room(folder: Path, package: Archive) -> None:
    """Remove long unused copies, and others until there is room. Raises StagingError if there is still too little."""
    own, needed = folder.parent, package.bytes + package.files * FILE_BYTES
    del_before = time.time() - UNUSED_S
    others = [other for other in own.iterdir() if other != folder and other.is_dir()]
    for last_use, other in sorted((_last_use(other), other) for other in others):
        if last_use > del_before and packages.room_bytes(own) >= needed:
            break
        with contextlib.suppress(BlockingIOError):
            lock = _lock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                _remove(other)
            finally:
                os.close(lock)
    free = packages.room_bytes(own)
    if free < needed:
        raise StagingError(f"{own.parent} has room for {fsio.size_text(free)}, and {fsio.size_text(needed)} are needed")


def _last_use(folder: Path) -> float:
    """Return when a copy was last used; 0 for what is left of one by a job that died while it unpacked."""
    try:
        return (folder / WHOLE).stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _remove(folder: Path) -> None:
    (folder / WHOLE).unlink(missing_ok=True)  # first: without it no job takes the rest for whole
    fsio.remove_tree(folder)


# ---------------------------------------------------------------------------------------------------------- unpacking


def _make(folder: Path, package: Archive) -> None:
    """Unpack ``package`` in ``folder``, which is locked and has no copy that is whole."""
    copied = folder / COPY
    try:
        (folder / WHOLE).unlink(missing_ok=True)
        for left in folder.iterdir():  # by a job that died, or by a cleaner
            fsio.remove_tree(left) if left.is_dir() else left.unlink()
        _make_room(folder, package)
        fsio.make_new_dir(copied)
        with Path(package.file).open("rb", buffering=0) as file:
            summed = SummedFile(file)
            try:
                _extract(summed, copied, package)
            except (tarfile.TarError, ValueError) as error:
                raise DamagedArchiveError(f"{package.file} is damaged: {error}") from error
            # What follows the archive's end belongs to the sum.
            while summed.read(BLOCK_BYTES):
                pass
        if (summed.size_bytes, summed.crc) != (package.size_bytes, package.crc):
            raise DamagedArchiveError(f"{package.file} is damaged, or was changed: it does not have its digest")
        if package.program is not None:
            _point_scripts(copied, package.source, package.program)
            _try_program(copied, package.program)
        fsio.write_json(folder / WHOLE, _mark(copied).to_json(), durable=False)
    except BaseException:
        _remove(folder)
        raise


def _extract(summed: SummedFile, folder: Path, package: Archive) -> None:
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


def _point_scripts(copied: Path, source: str, program: str) -> None:
    """Have the scripts of an environment start its copied Python. Their first line has the original's path."""
    old, new = f"#!{source}/".encode(), f"#!{copied}/".encode()
    for script in (copied / program).parent.iterdir():
        if script.is_symlink() or not script.is_file():
            continue
        status = script.stat()
        with script.open("rb") as file:
            if file.read(len(old)) != old:
                continue
            rest = file.read()
        script.write_bytes(new + rest)
        os.utime(script, ns=(status.st_atime_ns, status.st_mtime_ns))


def _try_program(copied: Path, program: str) -> None:
    """Raise StagingError if an environment's Python does not find its own packages in the copy."""
    command = [str(copied / program), "-I", "-c", "import sys; print(sys.prefix)"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StagingError(f"the copied Python cannot be started: {error}") from error
    if done.stdout.strip() != str(copied):
        output = (done.stderr or done.stdout).strip()[-200:]
        raise StagingError(f"the copied Python does not work from {copied}: {output}")


# --------------------------------------------------------------------------------------------------------- the program


def main(arguments: list[str]) -> None:
    """Copy what the request names, then hold the copies; or check copies."""
    logs.setup("copying")
    if arguments == ["check"]:
        found = {}
        for source, path in json.load(sys.stdin).items():
            folder = next(folder for folder in Path(path).parents if folder.parent.name.startswith(OWN_FOLDER))
            if is_whole(folder):
                found[source] = path
        print(json.dumps(found))
        return
    request = CopyRequest.from_json(json.load(sys.stdin))
    os.nice(request.nice)
    folders = this_node.staging_folders(request.stage_dir, os.environ)
    copies: dict[str, str] = {}
    problems: list[str] = []
    damaged: list[str] = []
    locks: list[int] = []
    began, is_new = time.monotonic(), False
    for package in request.packages:
        try:
            made = copy(package, folders)
        except (RequestError, OSError) as error:
            problems.append(f"{package.source}: {error}")
            damaged += [package.key] if isinstance(error, DamagedArchiveError) else []
            continue
        copies[package.source] = str(made.path)
        locks.append(made.lock)
        is_new |= made.is_new
    took_s = time.monotonic() - began if is_new else 0.0
    print(json.dumps({"copies": copies, "problems": problems, "damaged": damaged, "took_s": took_s}), flush=True)
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)  # its end tells the agent that the answer is complete
    if not locks:
        return
    # Become a small program that keeps the locks until the agent ends. This process dies with the agent.
    for lock in locks:
        os.set_inheritable(lock, True)
    program = shutil.which("sleep")
    while program is None:
        time.sleep(86_400)
    os.execv(program, ["sleep", "infinity"])


if __name__ == "__main__":
    main(sys.argv[1:])
