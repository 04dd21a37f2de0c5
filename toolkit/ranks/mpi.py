"""A process group over mpi4py: `dist.backend: mpi` on a torch that was built without MPI.

torch sees a Python `ProcessGroup` (torch 2.11 knows no other way). A collective with ``async_op=False`` is MPI's
blocking one, called in the caller's thread. The others run in order in a thread of the group, on a communicator of its
own. That thread blocks as well: MPI's non-blocking collectives took 2 to 4 times as long (64 MB 75 ms instead of 18).
So all ranks must pass the same ``async_op``, as they do where each runs the same program. Messages between two ranks
never block: a pipeline sends both ways at once.

Sums of half precision are made in fp32 and rounded once. Tensors on a GPU go through host memory, unless
``TOOLKIT_MPI_CUDA=1`` says that this MPI reads GPU memory.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial, wraps
from itertools import accumulate
from queue import SimpleQueue
from typing import Any, Concatenate, ParamSpec

import mpi4py
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.futures import Future

from toolkit.errors import ConfigError, StoppedError

mpi4py.rc.initialize = False  # a rank that only imports this module is no MPI process
mpi4py.rc.finalize = False  # see `finalize`
from mpi4py import MPI  # noqa: E402

#: The name under which torch knows the backend: torch 2.11 refuses `mpi`, which is its own.
NAME = "mpi4py"
#: Open MPI spins while it waits. With more threads than cores (data workers, a second thread of ours), the ranks that
#: it waits for would lose whole time slices: 25 MB took 26 ms instead of 10 on a busy machine.
YIELD_VARIABLE = "OMPI_MCA_mpi_yield_when_idle"
CUDA_VARIABLE = "TOOLKIT_MPI_CUDA"
#: Pause between two polls for messages that no caller waits for. A shorter one would take the CPU from other threads.
PAUSE_S = 50e-6
#: How long a caller that waits for a message polls without a pause.
EAGER_S = 1e-3
#: A rank's part of one piece of a long all-reduce. Pieces stay in the processor's caches: 64 MB on 2 ranks in 18 ms
#: instead of 45. With more ranks, and so a longer way round, pieces are longer.
PIECE_BYTES = 2 << 20
#: How long a closing group waits for each of its threads.
LEFT_AFTER_S = 1.0

Calls = Sequence[tuple[Any, ...]]
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
#: MPI's operations by torch's. An average is a sum that `_Reduction.finish` divides.
_OPS = {_Op.SUM: MPI.SUM, _Op.AVG: MPI.SUM, _Op.PRODUCT: MPI.PROD, _Op.MIN: MPI.MIN, _Op.MAX: MPI.MAX, **_BITWISE}
#: A bool is reduced as the byte 0 or 1: a sum is "any", as in NCCL, and a product "all".
_BOOL_OPS = {_Op.SUM: MPI.MAX, _Op.PRODUCT: MPI.MIN, _Op.MIN: MPI.MIN, _Op.MAX: MPI.MAX, **_BITWISE}


# ------------------------------------------------------------------------------------------------ opening and closing


def register() -> str:
    """Make the backend known to torch and return its name."""
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
    return NAME


def launch_key(rank: int, size: int) -> str:
    """Return a name that all ranks of this launch have, and no other launch. Every rank must call it."""
    _open(rank, size)
    return str(MPI.COMM_WORLD.bcast(secrets.token_hex(8)))


def _create(options: Any, _: object) -> MpiGroup:
    """Open a group. torch calls this on the members of each new group.

    The default group comes with an empty list of ranks.
    """
    ranks = list(options.global_ranks_in_group)
    # Each group gets its own communicator, so that its messages never meet those of another group. The default group
    # comes first, and opens MPI unless that has happened.
    if not ranks:
        _open(options.group_rank, options.group_size)
        _await_all(options.store, options.group_rank, options.group_size)
        return MpiGroup(MPI.COMM_WORLD.Dup(), options.group_rank, options.timeout)
    members = MPI.COMM_WORLD.Get_group().Incl(ranks)
    return MpiGroup(MPI.COMM_WORLD.Create_group(members), ranks[options.group_rank], options.timeout)


def _open(rank: int, size: int) -> None:
    if not MPI.Is_initialized():
        os.environ.setdefault(YIELD_VARIABLE, "1")
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    check_world((rank, size), (MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()), MPI.Get_library_version())
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise ConfigError(
            "dist.backend: mpi needs MPI_THREAD_MULTIPLE, which this MPI was not built or not opened with "
            f"({_first_line(MPI.Get_library_version())}); use another MPI, or dist.backend: gloo"
        )


def _await_all(store: dist.Store, rank: int, size: int) -> None:
    """Return when every rank has opened MPI. No message is sent before.

    Open MPI's ranks finish opening within some milliseconds of each other. A message from a rank that has finished
    crashes one that has not (pml/ob1, open-mpi/ompi issues 11438 and 13559: 1 in 67 launches on 4 nodes).
    """
    opened = [f"mpi_opened/{os.environ.get('TOOLKIT_ATTEMPT', '1')}/{other}" for other in range(size)]
    store.set(opened[rank], "1")
    store.wait(opened)


def check_world(ours: tuple[int, int], mpis: tuple[int, int], library: str) -> None:
    """Raise ConfigError unless MPI sees the ranks that were started. Both pairs are ``(rank, world size)``.

    A launcher that the MPI library does not know leaves each rank alone in a world of one, without a message.
    """
    if ours != mpis:
        raise ConfigError(
            f"dist.backend: mpi: rank {ours[0]} of {ours[1]} is rank {mpis[0]} of {mpis[1]} for MPI "
            f"({_first_line(library)}): this MPI does not know its launcher. Start the ranks with that MPI's own "
            "mpirun, or with srun --mpi=pmix (MPICH, Intel MPI: pmi2; `srun --mpi=list` shows what Slurm has), in a "
            "job of the toolkit by cluster.setup: [export SLURM_MPI_TYPE=pmix]"
        )


def finalize(_: type[BaseException] | None, error: BaseException | None, __: object) -> None:
    """Close MPI if all ranks come here. Called as the exit of a context.

    MPI waits in this for every rank, so after a failure it would wait for ever. A rank that ends without it tells the
    launcher that the job has failed, which is then right.
    """
    if (error is None or isinstance(error, StoppedError)) and MPI.Is_initialized() and not MPI.Is_finalized():
        MPI.Finalize()


def _first_line(text: str) -> str:
    return text.strip("\0\n ").splitlines()[0].split(", package")[0]


# ----------------------------------------------------------------------------------------------------------- messages


def _on_host(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the elements of ``tensor`` in a row, where MPI can read them.

    That is the tensor's own memory if they lie so, else a copy.
    """
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise TypeError(f"no {tensor.layout} or quantized tensors over MPI; send dense ones")
    device = tensor.device if os.environ.get(CUDA_VARIABLE) == "1" else torch.device("cpu")
    staged = tensor.detach().to(device, dtype or tensor.dtype).contiguous()
    if staged.is_cuda:
        torch.cuda.current_stream(staged.device).synchronize()  # MPI knows no streams
    return staged


def _give_back(staged: Tensor, tensor: Tensor) -> None:
    """Copy into ``tensor`` what has arrived in ``staged``, unless both share memory."""
    if staged.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(staged.view_as(tensor))
        if tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()  # the caller may be on another stream


def _message(tensor: Tensor, datatype: MPI.Datatype | None = None, counts: Sequence[int] | None = None) -> list[Any]:
    """Return mpi4py's description of ``tensor``'s memory.

    ``counts`` are the elements for or from each rank, in a row.
    """
    memory = MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)
    datatype = datatype or _MOVED[tensor.element_size()]
    if counts is None:
        return [memory, tensor.numel(), datatype]
    return [memory, (list(counts), [0, *accumulate(counts)][:-1]), datatype]


def _counts(tensors: Iterable[Tensor]) -> list[int]:
    return [tensor.numel() for tensor in tensors]


def _room(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return memory for the elements of ``tensors`` in a row."""
    return torch.empty(sum(_counts(tensors)), dtype=dtype)


def _check_sizes(counts: Sequence[int], ranks: int, elements: int) -> None:
    if len(counts) != ranks or sum(counts) != elements:
        raise ValueError(f"{len(counts)} parts of {sum(counts)} in all, for {ranks} ranks and {elements}")


def _check_own(own: int, due: int) -> None:
    if own != due:
        raise ValueError(f"this rank's tensor has {own} elements, its place among the others' {due}")


def _row(tensors: Iterable[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    return torch.cat([_on_host(tensor, dtype).view(-1) for tensor in tensors])


def _give_back_row(row: Tensor, tensors: Sequence[Tensor]) -> None:
    for part, tensor in zip(torch.split(row, _counts(tensors)), tensors, strict=True):
        _give_back(part, tensor)


@dataclass(frozen=True)
class _Reduction:
    """How MPI reduces tensors of one dtype (sum, minimum, ...)."""

    op: MPI.Op
    dtype: torch.dtype  #: in which MPI reduces
    datatype: MPI.Datatype
    divisor: int  #: the number of ranks for an average, else 1

    @classmethod
    def of(cls, op: Any, dtype: torch.dtype, size: int) -> _Reduction:
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
        _give_back(staged, tensor)


# --------------------------------------------------------------------------------------------------------------- work


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
            self._error = None if error is None else _named(self._what, error)
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
            future = Future[list[Tensor]](devices=list({tensor.device for tensor in self._result if tensor.is_cuda}))
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
        """Return the sender of a message received from any rank, as its rank in the group."""
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


def _nothing() -> None:
    """Finish work whose outcome is in its place already."""


def _named(what: str, error: Exception) -> Exception:
    """Return ``error`` with the rank and the operation in front."""
    if isinstance(error, MPI.Exception):
        told = f"{what} failed: {error.Get_error_string()}; have all ranks given the same sizes and types?"
        return dist.DistBackendError(told)
    return type(error)(f"{what}: {error}") if isinstance(error, TypeError | ValueError) else error


class _Thread:
    """A thread that takes works from a queue."""

    def __init__(self, name: str, target: Callable[[SimpleQueue[Any]], None]) -> None:
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._thread = threading.Thread(target=target, args=(self._queue,), daemon=True, name=name)
        self._thread.start()

    def put(self, work: MpiWork) -> None:
        self._queue.put(work)

    def close(self) -> None:
        """End the thread, or leave it behind: after a failure its work may wait for a rank that is dead."""
        self._queue.put(None)
        self._thread.join(LEFT_AFTER_S)


def _run_in_order(comm: MPI.Intracomm, queue: SimpleQueue[Collective | None]) -> None:
    while (work := queue.get()) is not None:
        work.run(comm)


def _ask_after(queue: SimpleQueue[MpiMessage | None]) -> None:
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


# -------------------------------------------------------------------------------------------------------------- group

_Arguments = ParamSpec("_Arguments")
_Method = Callable[Concatenate["MpiGroup", _Arguments], Work]


def _naming(method: _Method[_Arguments]) -> _Method[_Arguments]:
    """Decorate ``method`` so that its errors name the rank and the method."""

    @wraps(method)
    def call(group: MpiGroup, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> Work:
        try:
            return method(group, *args, **kwargs)
        except Exception as error:
            raise _named(f"{group.where}: {method.__name__}", error) from error

    return call


_Group: Any = dist.ProcessGroup  # for the type checker: torch's own signatures differ from version to version


class MpiGroup(_Group):  # type: ignore[misc]
    """torch's process group over one communicator. Names and arguments of the methods are torch's, old and new."""

    def __init__(self, comm: MPI.Intracomm, world_rank: int, timeout: timedelta) -> None:
        super().__init__(comm.Get_rank(), comm.Get_size())
        self.where = f"rank {world_rank}"
        self._comm = comm
        self._own = comm.Get_rank()
        self._count = comm.Get_size()
        self._limit_s = timeout.total_seconds()
        self._collectives = _Thread("mpi collectives", partial(_run_in_order, comm.Dup()))
        self._messages = _Thread("mpi messages", _ask_after)
        self._batch: list[Work] | None = None
        self._called = self._described = ""

    # torch calls these from C++ by the names used there.

    def getBackendName(self) -> str:
        return NAME

    def getGroupName(self) -> str:
        return self._called

    def setGroupName(self, name: str) -> None:
        self._called = name

    def getGroupDesc(self) -> str:
        return self._described

    def setGroupDesc(self, description: str) -> None:
        self._described = description

    def _get_backend(self, device: torch.device) -> Any:
        """Return the group, which is its own backend on every device."""
        return self

    def shutdown(self) -> None:
        """Stop the threads. The communicators end with MPI: to free them here would wait for all ranks."""
        self._collectives.close()
        self._messages.close()

    # ------------------------------------------------------------------------------------------------- to all ranks

    @_naming
    def broadcast(self, tensors: list[Tensor], opts: Any) -> Work:
        (tensor,) = tensors
        staged = _on_host(tensor)
        finish = partial(_give_back, staged, tensor)
        return self._do("Bcast", [(_message(staged), opts.rootRank)], opts, finish, tensors, staged)

    @_naming
    def barrier(self, opts: Any) -> Work:
        return self._do("Barrier", [()], opts, _nothing, [], None)

    # --------------------------------------------------------------------------------------------------- reductions

    @_naming
    def allreduce(self, tensors: list[Tensor], opts: Any) -> Work:
        (tensor,) = tensors
        reduction = _Reduction.of(opts.reduceOp, tensor.dtype, self._count)
        staged = _on_host(tensor, reduction.dtype)
        # In pieces that stay in the caches, see PIECE_BYTES.
        pieces = torch.split(staged.view(-1), PIECE_BYTES * self._count // staged.element_size())
        calls = [(MPI.IN_PLACE, _message(piece, reduction.datatype), reduction.op) for piece in pieces]
        return self._do("Allreduce", calls, opts, partial(reduction.finish, staged, tensor), tensors, staged)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> Work:
        return MpiWorks([self.allreduce([tensor], opts) for tensor in tensors])

    @_naming
    def reduce(self, tensors: list[Tensor], opts: Any) -> Work:
        (tensor,) = tensors
        reduction = _Reduction.of(opts.reduceOp, tensor.dtype, self._count)
        staged = _on_host(tensor, reduction.dtype)
        message = _message(staged, reduction.datatype)
        is_root = self._own == opts.rootRank
        # Only the root has an outcome: it reduces in place, the others just send.
        buffers = (MPI.IN_PLACE, message) if is_root else (message, None)
        finish = partial(reduction.finish, staged, tensor) if is_root else _nothing
        return self._do("Reduce", [(*buffers, reduction.op, opts.rootRank)], opts, finish, tensors, staged)

    @_naming
    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Work:
        (parts,) = inputs
        dtype = _Reduction.of(opts.reduceOp, outputs[0].dtype, self._count).dtype
        return self._reduce_scatter(outputs, _row(parts, dtype), self._shares(parts), opts)

    @_naming
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> Work:
        return self._reduce_scatter([output], input, [input.numel() // self._count] * self._count, opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Work:
        pairs = zip(outputs, inputs, strict=True)
        return MpiWorks([self.reduce_scatter_single(output, input, opts) for output, input in pairs])

    def _reduce_scatter(self, outputs: list[Tensor], row: Tensor, counts: list[int], opts: Any) -> Work:
        """Reduce ``row``, which holds ``counts`` elements for each rank."""
        (output,) = outputs
        _check_sizes(counts, self._count, row.numel())
        _check_own(output.numel(), counts[self._own])
        reduction = _Reduction.of(opts.reduceOp, output.dtype, self._count)
        sent, received = _on_host(row, reduction.dtype), _on_host(output, reduction.dtype)
        messages = _message(sent, reduction.datatype), _message(received, reduction.datatype)
        finish = partial(reduction.finish, received, output)
        return self._do("Reduce_scatter", [(*messages, counts, reduction.op)], opts, finish, outputs, (sent, received))

    # ------------------------------------------------------------------------------------------ gather and scatter

    @_naming
    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Work:
        (tensors,), (tensor,) = outputs, inputs
        sent, received, counts = _on_host(tensor), _room(tensors, tensor.dtype), self._shares(tensors)
        _check_own(tensor.numel(), counts[self._own])
        finish = partial(_give_back_row, received, tensors)
        arguments = (_message(sent), _message(received, counts=counts))
        return self._do("Allgatherv", [arguments], opts, finish, tensors, (sent, received))

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Work:
        """Gather several tensors. ``outputs`` holds a list for each rank."""
        by_tensor = zip(zip(*outputs, strict=True), inputs, strict=True)
        return MpiWorks([self.allgather([list(tensors)], [tensor], opts) for tensors, tensor in by_tensor])

    @_naming
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any) -> Work:
        _check_sizes([input.numel()] * self._count, self._count, output.numel())
        sent, received = _on_host(input), _on_host(output)
        # The input may be this rank's part of the output: MPI forbids the same memory on both sides.
        is_in_place = sent.data_ptr() == received.data_ptr() + self._own * sent.nbytes
        memory, _, datatype = _message(received)
        arguments = (
            MPI.IN_PLACE if is_in_place else _message(sent),
            [memory, sent.numel(), datatype],
        )  # from each rank
        finish = partial(_give_back, received, output)
        return self._do("Allgather", [arguments], opts, finish, [output], (sent, received))

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        """Gather several tensors, each into one. torch 2.11 gives no ``opts``."""
        pairs = zip(outputs, inputs, strict=True)
        return MpiWorks([self.all_gather_single(output, input, opts) for output, input in pairs])

    @_naming
    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Work:
        (tensor,), tensors = inputs, outputs[0] if self._own == opts.rootRank else []
        # Only the root receives.
        sent, received = _on_host(tensor), _room(tensors, tensor.dtype)
        into = _message(received, counts=self._shares(tensors)) if tensors else None
        finish = partial(_give_back_row, received, tensors)
        return self._do("Gatherv", [(_message(sent), into, opts.rootRank)], opts, finish, tensors, (sent, received))

    @_naming
    def gather_single(self, output: Tensor, input: Tensor, opts: Any) -> Work:
        is_root = self._own == opts.rootRank
        return self.gather([list(output.chunk(self._count))] if is_root else [], [input], opts)

    @_naming
    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Work:
        (output,), parts = outputs, inputs[0] if self._own == opts.rootRank else []
        # Only the root sends.
        sent, received = _row(parts) if parts else None, _on_host(output)
        source = None if sent is None else _message(sent, counts=self._shares(parts))
        calls = [(source, _message(received), opts.rootRank)]
        finish = partial(_give_back, received, output)
        return self._do("Scatterv", calls, opts, finish, outputs, (sent, received))

    def _shares(self, tensors: Sequence[Tensor]) -> list[int]:
        counts = _counts(tensors)
        _check_sizes(counts, self._count, sum(counts))
        return counts

    # -------------------------------------------------------------------------------------------------- all to all

    @_naming
    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Work:
        sent, received = _row(inputs), _room(outputs, outputs[0].dtype)
        arguments = (_message(sent, counts=self._shares(inputs)), _message(received, counts=self._shares(outputs)))
        finish = partial(_give_back_row, received, outputs)
        return self._do("Alltoallv", [arguments], opts, finish, outputs, (sent, received))

    @_naming
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: list[int] | None,
        input_splits: list[int] | None,
        opts: Any,
    ) -> Work:
        sent, received = _on_host(input), _on_host(output)
        arguments = (self._split(sent, input_splits), self._split(received, output_splits))
        finish = partial(_give_back, received, output)
        return self._do("Alltoallv", [arguments], opts, finish, [output], (sent, received))

    def _split(self, tensor: Tensor, splits: list[int] | None) -> list[Any]:
        """Describe ``splits`` rows of ``tensor`` for or from each rank; without ``splits`` equally many for each."""
        rows = tensor.shape[0] if tensor.dim() else 1
        splits = splits or [rows // self._count] * self._count
        _check_sizes(splits, self._count, rows)
        return _message(tensor, counts=[split * (tensor.numel() // max(rows, 1)) for split in splits])

    # ---------------------------------------------------------------------------------------------- point to point

    @_naming
    def send(self, tensors: list[Tensor], destination: int, tag: int) -> Work:
        staged = _on_host(tensors[0])
        request = self._comm.Isend(_message(staged), destination, tag)
        return self._start("send", request, _nothing, tensors, self._limit_s, staged)

    @_naming
    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Work:
        staged = _on_host(tensors[0])
        request = self._comm.Irecv(_message(staged), source, tag)
        return self._start("recv", request, partial(_give_back, staged, tensors[0]), tensors, self._limit_s, staged)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Work:
        return self.recv(tensors, MPI.ANY_SOURCE, tag)

    # ------------------------------------------------------------------------------------------------- several at once

    def _start_coalescing(self, device: torch.device) -> None:
        self._batch = []

    def _end_coalescing(self, device: torch.device) -> Work:
        """Return all work started since `_start_coalescing`.

        Nothing is held back until here, which is as correct and no slower.
        """
        works, self._batch = self._batch or [], None
        return MpiWorks(works)

    # ----------------------------------------------------------------------------------------------------- beginning

    def _do(
        self,
        method: str,
        calls: Calls,
        opts: Any,
        finish: Callable[[], object],
        result: list[Tensor],
        held: object,
    ) -> Work:
        """Start one of MPI's collectives. Run it here and now if the caller waits for it at once."""
        work = Collective(method, calls, f"{self.where}: {method.lower()}", finish, result, self._limit_s, held)
        if getattr(opts, "asyncOp", True):
            self._collectives.put(work)
        else:
            work.run(self._comm)
            work.wait()
        return self._noted(work)

    def _start(self, what: str, request: MPI.Request, *outcome: Any) -> Work:
        message = MpiMessage(request, f"{self.where}: {what}", *outcome)
        if not message.poll():
            self._messages.put(message)
        return self._noted(message)

    def _noted(self, work: Work) -> Work:
        if self._batch is not None:
            self._batch.append(work)
        return work

    # torch < 2.15 has other names for these; its C++ also looks for the last two by their own.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
    recvAnysource = recv_anysource
    start_coalescing = _start_coalescing
    end_coalescing = _end_coalescing
