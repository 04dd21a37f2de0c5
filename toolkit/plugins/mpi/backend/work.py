"""Operations in progress, as torch waits for them, and the threads that complete them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.futures import Future

from toolkit.devices.accelerator import module_of

#: Pause between two polls for messages that no caller waits for. A shorter one would take the CPU from other threads.
PAUSE_S = 50e-6
#: How long a caller that waits for a message polls without a pause.
EAGER_S = 1e-3
#: How long a closing group waits for each of its threads.
LEFT_AFTER_S = 1.0

Calls = Sequence[tuple[Any, ...]]


class MpiWork(Work):
    """One operation in progress. When MPI is done with it, ``finish`` puts the outcome in its place.

    ``held`` is the memory that MPI reads and writes until then.
    """

    def __init__(
        self, what: str, finish: Callable[[], object], result: list[Tensor], limit_s: float, held: object
    ) -> None:
        super().__init__()
        self._what = what
        self._finish = finish
        self._result = result
        self._limit_s = limit_s
        self._held = held
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._future: Future[list[Tensor]] | None = None
        self._error: Exception | None = None

    def _end(self, error: Exception | None = None) -> None:
        """End the work, once, from the thread that completed it or failed to."""
        try:
            if error is None:
                self._finish()
        except Exception as failure:
            error = failure
        with self._lock:
            self._error = None if error is None else named(self._what, error)
            self._held = None
            self._ended.set()
            future = self._future
        if future is not None:
            self._announce(future)  # without the lock: a callback may wait for this very work

    def _announce(self, future: Future[list[Tensor]]) -> None:
        if self._error is None:
            future.set_result(self._result)
        else:
            future.set_exception(self._error)  # type: ignore[arg-type]

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until the work is done. Raises DistBackendError on failure, or after ``timeout`` (0: the group's)."""
        limit_s = timeout.total_seconds() or self._limit_s
        if not self._ends_within(limit_s):
            raise dist.DistBackendError(f"{self._what}: not done after {limit_s:g} s; have all ranks called it?")
        if self._error is not None:
            raise self._error
        return True

    def _ends_within(self, limit_s: float) -> bool:
        return self._ended.wait(limit_s)

    def synchronize(self) -> None:
        """Do nothing: once `wait` has returned, no stream is behind."""

    def get_future(self) -> Future[list[Tensor]]:
        """Return a future of the tensors. The thread that completes the work sets it."""
        with self._lock:
            if self._future is not None:
                return self._future
            future = Future[list[Tensor]](devices=list({tensor.device for tensor in self._result if not tensor.is_cpu}))
            # The work ended before the future was asked for.
            if self._ended.is_set():
                self._announce(future)
            self._future = future
            return future

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> list[Tensor]:
        return self._result


class Collective(MpiWork):
    """Calls of one of MPI's collectives, one after the other. ``calls`` holds the arguments of each."""

    def __init__(self, method: str, calls: Calls, *work: Any) -> None:
        super().__init__(*work)
        self._method = method
        self._calls = calls

    def run(self, comm: MPI.Intracomm) -> None:
        """Make the calls. Blocks until all ranks have made them."""
        try:
            for arguments in self._calls:
                getattr(comm, self._method)(*arguments)
        except Exception as error:
            self._end(error)
        else:
            self._end()


class MpiMessage(MpiWork):
    """A message sent or received. MPI moves it only during a poll: by the caller that waits, else by a thread."""

    def __init__(self, request: MPI.Request, *work: Any) -> None:
        super().__init__(*work)
        self._request = request
        self._asking = threading.Lock()
        self._status = MPI.Status()

    def poll(self) -> bool:
        """Poll MPI, unless another thread is doing so, and return whether the message is done. Never blocks."""
        # Only one thread tests the request; another one returns what is known so far.
        if not self._ended.is_set() and self._asking.acquire(blocking=False):
            try:
                if not self._ended.is_set() and self._request.Test(self._status):
                    self._end()
            except MPI.Exception as error:
                self._end(error)
            finally:
                self._asking.release()
        return self._ended.is_set()

    def _ends_within(self, limit_s: float) -> bool:
        start = time.monotonic()
        while not self.poll():
            waited_s = time.monotonic() - start
            if waited_s > limit_s:
                return False
            time.sleep(0 if waited_s < EAGER_S else PAUSE_S)
        return True

    def is_completed(self) -> bool:
        return self.poll()

    def source_rank(self) -> int:
        """Return the sender's rank in the group, for a message received from any rank."""
        return int(self._status.Get_source())

    _source_rank = source_rank


class MpiWorks(Work):
    """Several operations as one, done when all are."""

    def __init__(self, works: Sequence[Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return all(work.wait(timeout) for work in self._works)

    def synchronize(self) -> None:
        """Do nothing, see `MpiWork`."""

    def get_future(self) -> Future[list[Tensor]]:
        every = torch.futures.collect_all([work.get_future() for work in self._works])
        return every.then(lambda done: [tensor for one in done.value() for tensor in one.value()])

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> Any:
        return next((work.exception() for work in self._works if work.exception() is not None), None)

    def result(self) -> list[Tensor]:
        return [tensor for work in self._works for tensor in work.result()]


def nothing() -> None:
    """Finish work whose outcome is in its place already."""


def named(what: str, error: Exception) -> Exception:
    """Return ``error`` with the rank and the operation in front."""
    if isinstance(error, MPI.Exception):
        text = f"{what} failed: {error.Get_error_string()}; have all ranks given the same sizes and types?"
        return dist.DistBackendError(text)
    return type(error)(f"{what}: {error}") if isinstance(error, TypeError | ValueError) else error


class WorkThread:
    """A thread that takes works from a queue."""

    def __init__(self, name: str, target: Callable[[SimpleQueue[Any]], None]) -> None:
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._thread = threading.Thread(target=target, args=(self._queue,), daemon=True, name=name)
        self._thread.start()

    def put(self, work: MpiWork) -> None:
        self._queue.put(work)

    def close(self) -> None:
        """End the thread, or leave it behind. After a failure its work may wait for a rank that is dead."""
        self._queue.put(None)
        self._thread.join(LEFT_AFTER_S)


def run_in_order(comm: MPI.Intracomm, queue: SimpleQueue[Collective | None]) -> None:
    while (work := queue.get()) is not None:
        work.run(comm)


def poll_until_done(queue: SimpleQueue[MpiMessage | None]) -> None:
    pending: list[MpiMessage] = []
    while True:
        # With nothing pending the thread sleeps in the queue and costs nothing.
        if not pending or not queue.empty():
            arrived = queue.get()
            if arrived is None:
                return
            pending.append(arrived)
        else:
            pending = [message for message in pending if not message.poll()]
            time.sleep(PAUSE_S)


CUDA_VARIABLE = "TOOLKIT_MPI_CUDA"

#: MPI's type to move elements, by their size in bytes.
_MOVED = {1: MPI.UINT8_T, 2: MPI.UINT16_T, 4: MPI.UINT32_T, 8: MPI.UINT64_T, 16: MPI.C_DOUBLE_COMPLEX}
#: MPI's type for a reduction, by torch's; half precision is reduced as fp32 and a bool as a byte.
_REDUCED = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.uint8: MPI.UINT8_T,
    torch.int8: MPI.INT8_T,
    torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
}
_Op = dist.ReduceOp
_BITWISE = {_Op.BAND: MPI.BAND, _Op.BOR: MPI.BOR, _Op.BXOR: MPI.BXOR}
#: MPI's operations by torch's. An average is a sum that `Reduction.finish` divides.
_OPS = {_Op.SUM: MPI.SUM, _Op.AVG: MPI.SUM, _Op.PRODUCT: MPI.PROD, _Op.MIN: MPI.MIN, _Op.MAX: MPI.MAX, **_BITWISE}
#: A bool is reduced as the byte 0 or 1: a sum is "any", as in NCCL, and a product "all".
_BOOL_OPS = {_Op.SUM: MPI.MAX, _Op.PRODUCT: MPI.MIN, _Op.MIN: MPI.MIN, _Op.MAX: MPI.MAX, **_BITWISE}


def on_host(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the elements of ``tensor`` in a row where MPI can read them: its own memory if possible, else a copy."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise TypeError(f"no {tensor.layout} or quantized tensors over MPI; send dense ones")
    device = tensor.device if os.environ.get(CUDA_VARIABLE) == "1" else torch.device("cpu")
    staged = tensor.detach().to(device, dtype or tensor.dtype).contiguous()
    if not staged.is_cpu:
        module_of(staged.device).current_stream(staged.device).synchronize()  # MPI knows no streams
    return staged


def give_back(staged: Tensor, tensor: Tensor) -> None:
    """Copy into ``tensor`` what has arrived in ``staged``, unless both share memory."""
    if staged.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(staged.view_as(tensor))
        if not tensor.is_cpu:
            module_of(tensor.device).current_stream(tensor.device).synchronize()  # the caller may be on another stream


def described(tensor: Tensor, datatype: MPI.Datatype | None = None, counts: Sequence[int] | None = None) -> list[Any]:
    """Return mpi4py's description of ``tensor``'s memory. ``counts``: the elements for or from each rank, in a row."""
    memory = MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)
    datatype = datatype or _MOVED[tensor.element_size()]
    if counts is None:
        return [memory, tensor.numel(), datatype]
    return [memory, (list(counts), [0, *accumulate(counts)][:-1]), datatype]


def sizes(tensors: Iterable[Tensor]) -> list[int]:
    return [tensor.numel() for tensor in tensors]


def room(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return memory for the elements of ``tensors`` in a row."""
    return torch.empty(sum(sizes(tensors)), dtype=dtype)


def check_sizes(counts: Sequence[int], ranks: int, elements: int) -> None:
    if len(counts) != ranks or sum(counts) != elements:
        raise ValueError(f"{len(counts)} parts of {sum(counts)} in all, for {ranks} ranks and {elements}")


def check_own(own: int, due: int) -> None:
    if own != due:
        raise ValueError(f"this rank's tensor has {own} elements, its place among the others' {due}")


def in_a_row(tensors: Iterable[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    return torch.cat([on_host(tensor, dtype).view(-1) for tensor in tensors])


def give_back_row(row: Tensor, tensors: Sequence[Tensor]) -> None:
    for part, tensor in zip(torch.split(row, sizes(tensors)), tensors, strict=True):
        give_back(part, tensor)


@dataclass(frozen=True)
class Reduction:
    """How MPI reduces tensors of one dtype (sum, minimum, ...)."""

    op: MPI.Op
    dtype: torch.dtype  #: in which MPI reduces
    datatype: MPI.Datatype
    divisor: int  #: the number of ranks for an average, else 1

    @classmethod
    def of(cls, op: Any, dtype: torch.dtype, size: int) -> Reduction:
        """Return the reduction for torch's ``op``. Raises TypeError where MPI has no such operation."""
        kind = op.op if isinstance(op, dist.ReduceOp) else op
        # Half precision travels as fp32 and bools as bytes: MPI has no operations on them.
        half = dtype in (torch.float16, torch.bfloat16)
        wire = torch.float32 if half else torch.uint8 if dtype == torch.bool else dtype
        found = (_BOOL_OPS if dtype == torch.bool else _OPS).get(kind)
        if found is None or wire not in _REDUCED or (kind in _BITWISE and wire.is_floating_point):
            raise TypeError(f"no {kind} of {dtype} over MPI")
        return cls(found, wire, _REDUCED[wire], size if kind == _Op.AVG else 1)

    def finish(self, staged: Tensor, tensor: Tensor) -> None:
        """Put the outcome, which lies in ``staged``, into ``tensor``."""
        if self.divisor != 1:
            staged.div_(self.divisor, rounding_mode=None if self.dtype.is_floating_point else "trunc")
        give_back(staged, tensor)
