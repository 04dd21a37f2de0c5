"""Decoded images in memory, shared by the data workers of all ranks on a node.

The node's agent holds the file, so that ranks which start again find it filled. The kernel frees it when the agent
ends in any way. Without an agent each rank has a file of its own, which ends with it and its workers. The layout: the
key (two words), where the next image goes, a row (start, height, width) for each image, and the pixels.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from toolkit.base import node_memory
from toolkit.base.errors import ConfigError
from toolkit.nodes.agent import state_memory

_HEAD = 3
_CHANNELS = 3


class PixelCache:
    """Pixels (h, w, 3) uint8 of images by number, in at most ``most_bytes``.

    An image that does not fit is not kept. ``key`` identifies the data set. Make it before the workers are forked.
    Raises ConfigError for more memory than there is.
    """

    def __init__(self, count: int, most_bytes: int, key: str) -> None:
        if most_bytes > (limit := node_memory.total_bytes()):
            raise ConfigError(
                f"data.images.cache_gb: {most_bytes / 2**30:g} is more than the {limit / 2**30:.1f} GB of memory that "
                "this job may take on a node; use less, and leave room for the ranks"
            )
        words = np.frombuffer(hashlib.sha256(f"{key} {count} {most_bytes}".encode()).digest()[:16], np.int64)
        first = 8 * (_HEAD + 3 * count)
        # The file of the node's agent is tried first, then a file of this rank.
        for path in (os.environ.get(state_memory.PIXELS), None):
            self._file = os.open(path, os.O_RDWR) if path else os.memfd_create("pixels")
            with self._locked():
                if not os.fstat(self._file).st_size:
                    os.ftruncate(self._file, first + most_bytes)
                    os.pwrite(self._file, np.array([*words, first], np.int64).tobytes(), 0)
            if os.pread(self._file, 16, 0) == words.tobytes():
                break
            os.close(self._file)  # the node's file holds another data set of the job
        self._bytes = np.frombuffer(mmap.mmap(self._file, first + most_bytes), np.uint8)
        numbers = self._bytes[:first].view(np.int64)
        self._head, self._rows = numbers[:_HEAD], numbers[_HEAD:].reshape(count, 3)

    def get(self, index: int) -> Tensor | None:
        """Return the pixels of image ``index``, or None if they are not here. They must not be changed."""
        start, height, width = self._rows[index].tolist()
        if not start:
            return None
        pixels = self._bytes[start : start + height * width * _CHANNELS]
        return torch.from_numpy(pixels.reshape(height, width, _CHANNELS))

    def put(self, index: int, pixels: Tensor) -> None:
        """Keep the pixels of image ``index`` if there is room."""
        height, width, _ = pixels.shape
        if self._head[2] + pixels.numel() > self._bytes.size:
            return
        # Taken under a lock, and filled without it: what a killed worker has taken stays unused.
        with self._locked():
            start = int(self._head[2])
            if self._rows[index, 0] or start + pixels.numel() > self._bytes.size:
                return
            self._head[2] += pixels.numel()
        self._bytes[start : start + pixels.numel()].reshape(pixels.shape)[...] = pixels.numpy()
        with self._locked():  # also a fence: the row must not be seen before the pixels
            self._rows[index] = 0, height, width
            self._rows[index, 0] = start

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the file's lock, which the kernel takes from a process that ends."""
        fcntl.lockf(self._file, fcntl.LOCK_EX, 16, 0)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 16, 0)
