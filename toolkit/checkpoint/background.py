"""Saving while the training continues.

The loop waits only for a copy into kept buffers. A thread writes and commits. The buffers belong to this module and are
reused: new memory costs a page fault every 4 KB, ten times the copy itself. Host memory for CUDA tensors is
page-locked, so that the copies are only enqueued; the thread waits for them.
"""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

from toolkit.base.errors import CheckpointError
from toolkit.checkpoint.exchange import KeyValue, describe
from toolkit.checkpoint.tensors import as_bytes
from toolkit.devices import page_locked
from toolkit.ranks.state import Entry, State, is_written_by


class Staging:
    """The staging buffers of one rank: one block for all tensors on its GPU, and a buffer for each other one."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}
        self._block = page_locked.Block()
        self._making: threading.Thread | None = None

    def make_room(self, state: State, rank: int) -> None:
        """Make the buffers for a later :meth:`copy`, in a thread, where the loop waits for a disk anyway."""
        if self._making is not None:
            return
        # What is to be stored may be copies of the training's own, which must not live on for this.
        own, on_gpu = _tensors(state, rank)
        like = {name: torch.empty_like(live, device="meta") for name, live in own.items()}
        on_device = page_locked.on_current_device() if on_gpu else nullcontext()

        def make() -> None:
            with suppress(RuntimeError, OSError), on_device:  # out of memory: the copy will say so
                self._block.places({name: like[name] for name in on_gpu})
                for name in like.keys() - on_gpu:
                    buffer = torch.empty(like[name].shape, dtype=like[name].dtype)
                    ctypes.memset(buffer.data_ptr(), 0, buffer.nbytes)  # by one thread: torch would start more
                    self._buffers[name] = buffer

        self._making = threading.Thread(target=make, name="save-buffers", daemon=True)
        self._making.start()

    def copy(self, state: State, rank: int) -> tuple[State, Callable[[], None]]:
        """Copy what ``rank`` has to write of ``state`` as it is now.

        Returns the copy, and a callable that waits until it is complete. The next call overwrites the copy.
        """
        if self._making is not None:
            self._making.join()
        own, on_gpu = _tensors(state, rank)
        places = self._block.places({name: own[name] for name in on_gpu})
        staged: dict[str, Entry] = {}
        for name, entry in state.items():
            if is_written_by(entry, rank):
                staged[name] = dataclasses.replace(entry, value=self._copy(name, entry, places.get(name)))
        # Other copies are complete already.
        return staged, page_locked.enqueued() if on_gpu else lambda: None

    def _copy(self, name: str, entry: Entry, place: torch.Tensor | None) -> Any:
        live = entry.value
        if not isinstance(live, torch.Tensor):
            return copy.deepcopy(live)
        live = live.detach().resolve_conj().resolve_neg()  # such views have no bytes of their own
        kept = self._buffers.get(name) if place is None else place
        # Allocate only where the kept buffer does not fit: new memory is slow.
        if kept is None or (kept.shape, kept.dtype) != (live.shape, live.dtype):
            kept = self._buffers[name] = torch.empty(live.shape, dtype=live.dtype)
        if live.is_contiguous():  # as bytes: some dtypes of torch (int1) have no copy of their own
            as_bytes(kept).copy_(as_bytes(live), non_blocking=True)
        else:
            kept.copy_(live, non_blocking=True)
        return kept


def _tensors(state: State, rank: int) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return the tensors that ``rank`` has to write, and the names of those on a GPU."""
    values = {name: entry.value for name, entry in state.items() if is_written_by(entry, rank)}
    own = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    return own, [name for name, tensor in own.items() if not tensor.is_cpu]


class CuttableClient:
    """A store client for one save alone: a client serves one call at a time. Once it is cut, every call is refused."""

    def __init__(self, client: KeyValue) -> None:
        self._client = client
        self.is_cut = False

    def set(self, key: str, value: str, /) -> None:
        self._open().set(key, value)

    def get(self, key: str, /) -> bytes:
        return self._open().get(key)

    def check(self, keys: list[str], /) -> bool:
        return self._open().check(keys)

    def delete_key(self, key: str, /) -> bool:
        return self._open().delete_key(key)

    def _open(self) -> KeyValue:
        if self.is_cut:
            raise CheckpointError("given up, because the training has ended")
        return self._client


class BackgroundSave:
    """One save, which ``write`` writes in a thread.

    An error is stored in ``error`` as a CheckpointError. Unless the save was given up, ``note_error`` gets it at once.
    """

    #: Seconds that `abandon` waits: an fsync cannot be interrupted.
    LONGEST_END_S = 5.0

    def __init__(
        self,
        step: int,
        client: CuttableClient | None,
        write: Callable[[], Path],
        note_error: Callable[[int, CheckpointError], None],
    ) -> None:
        self.step = step
        self.error: CheckpointError | None = None
        self.is_cancelled = False
        self._client = client
        self._write = write
        self._note_error = note_error
        self._thread = threading.Thread(target=self._run, name=f"save-{step}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._write()
        except Exception as error:
            text = f"the checkpoint of step {self.step} was not written: {describe(error)}"
            self.error = error if isinstance(error, CheckpointError) else CheckpointError(text)
            if not self.is_cancelled:
                self._note_error(self.step, self.error)

    @property
    def is_here(self) -> bool:
        """True if the calling thread is the one that writes."""
        return threading.current_thread() is self._thread

    def refuse_if_cancelled(self) -> None:
        """Raise CheckpointError, which all ranks learn of, if cancelled. Call it between two pieces of a file."""
        if self.is_cancelled:
            raise CheckpointError("given up for a stop, which saves a later step")

    def wait(self) -> None:
        self._thread.join()

    def abandon(self) -> None:
        """Give the save up without telling the other ranks, which may have died.

        An interpreter that ends while a thread is in a call of torch's store aborts the process. That leaves a core
        file and hides the error that ended it.
        """
        self.is_cancelled = True
        if self._client is not None:
            self._client.is_cut = True
        self._thread.join(self.LONGEST_END_S)
