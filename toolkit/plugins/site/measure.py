"""Tries a site out by ranks on its nodes: an all-reduce, and a shared folder.

Every rank calls each function in the same order. In the folder rank 0 writes and the last rank reads. They are on two
nodes if there are two.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from toolkit.base import fsio

REDUCED_BYTES = 16 * 2**20
#: Files that are written by one rank and awaited by another, and how long each is awaited.
FILES, WAIT_S = 20, 30.0
#: A file that one rank replaces while another reads it.
REPLACEMENTS, REPLACED_BYTES = 200, 2**16


def backend() -> str:
    """Return the backend of the process group."""
    return str(dist.get_backend())


def all_reduce(device: torch.device) -> bool:
    """True if an all-reduce of 16 MiB gives the sum over all ranks."""
    values = torch.ones(REDUCED_BYTES // 4, device=device)
    dist.all_reduce(values)
    return bool((values == dist.get_world_size()).all())


def shared_folder(folder: Path) -> dict[str, float]:
    """Measure how the last rank sees what rank 0 does in ``folder``.

    Returns the figures on the last rank, an empty result on the others. ``visible_s``: the longest wait for a renamed
    file, after the renaming rank has said that it is done. ``torn``: reads of a file that was being replaced which
    found neither the old nor the new content. ``lock_held``: 1 if a lock of the other rank kept this one out, and did
    not after its release. ``mtime_ahead_s``: the time of a file's last change, against the clock of the rank that
    wrote it.
    """
    is_writer, is_reader = dist.get_rank() == 0, dist.get_rank() == dist.get_world_size() - 1
    figures = {
        "visible_s": _visible_s(folder, is_writer, is_reader),
        "torn": _torn_reads(folder, is_writer, is_reader),
        "lock_held": _lock_held(folder, is_writer, is_reader),
        "mtime_ahead_s": _mtime_ahead_s(folder, is_writer, is_reader),
    }
    return figures if is_reader else {}


def _visible_s(folder: Path, is_writer: bool, is_reader: bool) -> float:
    longest = 0.0
    for number in range(FILES):
        path = folder / f"visible-{number}"
        if is_writer:
            fsio.write_atomic(path, str(number), durable=False)
        dist.barrier()
        if is_reader:
            began = time.perf_counter()
            _wait(path.exists)
            longest = max(longest, time.perf_counter() - began)
        dist.barrier()
    return longest


def _torn_reads(folder: Path, is_writer: bool, is_reader: bool) -> float:
    path, done = folder / "replaced", folder / "replaced-done"
    if is_writer:
        fsio.write_atomic(path, bytes(REPLACED_BYTES), durable=False)
    dist.barrier()
    torn = 0
    if is_writer:
        for number in range(REPLACEMENTS):
            fsio.write_atomic(path, bytes([number % 256]) * REPLACED_BYTES, durable=False)
        fsio.write_atomic(done, "", durable=False)
    elif is_reader:
        _wait(path.exists)
        deadline = time.monotonic() + WAIT_S
        while not done.exists() and time.monotonic() < deadline:
            try:
                content = path.read_bytes()
            except OSError:  # a replaced file must never be missing, nor stale
                torn += 1
                continue
            torn += len(content) != REPLACED_BYTES or len(set(content)) != 1
    dist.barrier()
    return float(torn)


def _lock_held(folder: Path, is_writer: bool, is_reader: bool) -> float:
    path = folder / "lock"
    if is_writer:
        fsio.write_atomic(path, "", durable=False)
    dist.barrier()
    if is_reader:
        _wait(path.exists)
    held = freed = False
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC) if is_writer or is_reader else None
    # A barrier ends each stage: rank 0 locks, the last rank fails to lock, rank 0 unlocks, the last rank locks.
    try:
        if is_writer and fd is not None:
            _lock(fd)
        dist.barrier()
        if is_reader and fd is not None and not is_writer:  # a process is never kept out by its own lock
            held = not _lock(fd)
        dist.barrier()
        if is_writer and fd is not None:
            fcntl.lockf(fd, fcntl.LOCK_UN)
        dist.barrier()
        if is_reader and fd is not None:
            freed = _lock(fd)
    finally:
        if fd is not None:
            os.close(fd)
    dist.barrier()
    return float(held and freed)


def _lock(fd: int) -> bool:
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _mtime_ahead_s(folder: Path, is_writer: bool, is_reader: bool) -> float:
    path = folder / "mtime"
    if is_writer:
        fsio.write_atomic(path, "", durable=False)
        fsio.write_atomic(folder / "mtime-clock", repr(time.time()), durable=False)
    dist.barrier()
    ahead_s = 0.0
    if is_reader and _wait((folder / "mtime-clock").exists):
        ahead_s = path.stat().st_mtime - float((folder / "mtime-clock").read_text())
    dist.barrier()
    return ahead_s


def _wait(is_true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + WAIT_S
    while not is_true() and time.monotonic() < deadline:
        time.sleep(0.001)
    return is_true()
