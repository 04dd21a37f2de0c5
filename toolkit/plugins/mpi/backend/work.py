"""Operations in progress, as torch waits for them, and the threads that complete them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.futures import Future

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
        """Block until the work is done.

        Raises DistBackendError when MPI fails, or after ``timeout`` (the group's where it is 0).
        """
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
                self._ask()
            finally:
                self._asking.release()
        return self._ended.is_set()

    def _ask(self) -> None:
        if self._ended.is_set():
            return
        try:
            is_done = self._request.Test(self._status)
        except MPI.Exception as error:
            self._end(error)
        else:
            if is_done:
                self._end()

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
        told = f"{what} failed: {error.Get_error_string()}; have all ranks given the same sizes and types?"
        return dist.DistBackendError(told)
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
