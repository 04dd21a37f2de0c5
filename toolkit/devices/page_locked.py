"""Page-locked host memory for copies from a GPU, which are only enqueued then: the host does not wait for them.

torch's own allocator of such memory rounds each tensor up to a power of two. Here the process maps memory of the right
size, and registers it with CUDA or HIP. Other runtimes have no such call in torch: copies to them are waited for.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch import Tensor

from toolkit.base import logs
from toolkit.devices import accelerator
from toolkit.devices.kinds import CUDA, ROCM

#: Tensors begin at multiples of this.
ALIGNMENT = 64
#: Page-locked for all CUDA contexts of the process (driver_types.h).
_PORTABLE = 1

log = logs.get(__name__)


def lock(buffer: mmap.mmap) -> bool:
    """Page-lock ``buffer``, as torch.cuda._pin_memory_utils does. Return True on success."""
    if accelerator.built_for() not in (CUDA, ROCM):
        return False
    cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = int(cuda.cudaHostRegister(_address(buffer), len(buffer), _PORTABLE))
    if error:
        log.warning("%.1f MB cannot be page-locked (CUDA error %d): copies are waited for", len(buffer) / 1e6, error)
        # CUDA keeps the error, and torch asks for it after each launch: the next kernel, whichever it is, would raise
        # it. So launch one here. torch drops the error when it raises it.
        with suppress(RuntimeError):
            torch.ones(1, device="cuda")
    return not error


def unlock(buffer: mmap.mmap) -> None:
    """Undo :func:`lock`."""
    torch.cuda.cudart().cudaHostUnregister(_address(buffer))  # type: ignore[no-untyped-call]


def _address(buffer: mmap.mmap) -> int:
    return torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()


def bind_current_device() -> AbstractContextManager[None]:
    """Return a block that gives another thread the current GPU of this one.

    The current GPU of a new thread is the first one of the process. CUDA would make a context there at its first call,
    which takes some hundred MB of another rank's memory.
    """
    module: Any = accelerator.module_of(torch.device(accelerator.built_for().type))
    device: AbstractContextManager[None] = module.device(module.current_device())
    return device


def stream_waiter() -> Callable[[], None]:
    """Return a call that waits for what is enqueued on the current stream now. Any thread may make it."""
    kind, on_device = accelerator.built_for(), bind_current_device()
    module: Any = accelerator.module_of(torch.device(kind.type))
    # By a blocking one the waiting thread leaves its CPU.
    event = module.Event(blocking=True) if kind in (CUDA, ROCM) else module.Event()
    event.record()

    def wait() -> None:
        with on_device:
            event.synchronize()

    return wait


def layout(tensors: Mapping[str, Tensor], start: int = 0) -> tuple[dict[str, int], int]:
    """Return where each tensor begins, the first at ``start``, and where the last ends. Both are in bytes."""
    starts: dict[str, int] = {}
    for name, tensor in tensors.items():
        starts[name] = start
        start += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return starts, start


class Block:
    """One page-locked block for many tensors. It is kept while they fit."""

    def __init__(self) -> None:
        self._map: mmap.mmap | None = None
        self._is_locked = False
        self._places: dict[str, Tensor] = {}

    def buffers_like(self, like: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return a place in host memory for each tensor. The next call may give the same memory again."""
        wanted, had = ([(name, t.shape, t.dtype) for name, t in each.items()] for each in (like, self._places))
        if wanted != had:
            starts, end = layout(like)
            self._places = {}
            if end and (self._map is None or len(self._map) < end):
                if self._map is not None and self._is_locked:
                    unlock(self._map)
                # Shared, so that a fork (a data worker) does not make the next write go to a copy of the page, which
                # the GPU does not know. MAP_POPULATE: all pages now, in one call.
                flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
                self._map = mmap.mmap(-1, end, flags=flags)
                self._is_locked = lock(self._map)
            self._places = {name: self._place(like[name], start) for name, start in starts.items()}
        return self._places

    def _place(self, like: Tensor, start: int) -> Tensor:
        if not like.nbytes:
            return torch.empty(like.shape, dtype=like.dtype)
        assert self._map is not None
        flat = torch.frombuffer(self._map, dtype=torch.uint8, offset=start, count=like.nbytes)
        return flat.view(like.dtype).view(like.shape)
