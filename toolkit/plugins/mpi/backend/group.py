"""torch's process group over one communicator of MPI."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor
from torch._C._distributed_c10d import Work

from toolkit.base.errors import ConfigError, StoppedError
from toolkit.devices import accelerator
from toolkit.plugins.mpi.backend.work import (
    Calls,
    Collective,
    MpiMessage,
    MpiWorks,
    Reduction,
    WorkThread,
    check_own,
    check_sizes,
    described,
    give_back,
    give_back_row,
    in_a_row,
    named,
    nothing,
    on_host,
    poll_until_done,
    room,
    run_in_order,
    sizes,
)

#: The name under which torch knows the backend: torch 2.11 refuses `mpi`, which is its own.
NAME = "mpi4py"
#: A rank's part of one piece of a long all-reduce. Pieces stay in the processor's caches: 64 MB on 2 ranks in 18 ms
#: instead of 45. With more ranks, and so a longer way round, pieces are longer.
PIECE_BYTES = 2 << 20

_Arguments = ParamSpec("_Arguments")
_Method = Callable[Concatenate["MpiGroup", _Arguments], Work]


def _naming(method: _Method[_Arguments]) -> _Method[_Arguments]:
    """Decorate ``method`` so that its errors name the rank and the method."""

    @wraps(method)
    def call(group: MpiGroup, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> Work:
        try:
            return method(group, *args, **kwargs)
        except Exception as error:
            raise named(f"{group.where}: {method.__name__}", error) from error

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
        self._collectives = WorkThread("mpi collectives", partial(run_in_order, comm.Dup()))
        self._messages = WorkThread("mpi messages", poll_until_done)
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
        """Return the group, which is its backend on every device."""
        return self

    def shutdown(self) -> None:
        """Stop the threads. The communicators end with MPI: to free them here would wait for all ranks."""
        self._collectives.close()
        self._messages.close()

    # ------------------------------------------------------------------------------------------------- several at once

    def _start_coalescing(self, device: torch.device) -> None:
        self._batch = []

    def _end_coalescing(self, device: torch.device) -> Work:
        """Return all work started since `_start_coalescing`. Nothing is held back: that would be no faster."""
        works, self._batch = self._batch or [], None
        return MpiWorks(works)

    # ----------------------------------------------------------------------------------------------------- beginning

    def _do(
        self, method: str, calls: Calls, opts: Any, finish: Callable[[], object], result: list[Tensor], held: object
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

    # The names of these in torch < 2.15, whose C++ also looks for those above.
    start_coalescing = _start_coalescing
    end_coalescing = _end_coalescing

    # ------------------------------------------------------------------------------------------------- to all ranks

    @_naming
    def broadcast(self, tensors: list[Tensor], opts: Any) -> Work:
        (tensor,) = tensors
        staged = on_host(tensor)
        finish = partial(give_back, staged, tensor)
        return self._do("Bcast", [(described(staged), opts.rootRank)], opts, finish, tensors, staged)

    @_naming
    def barrier(self, opts: Any) -> Work:
        return self._do("Barrier", [()], opts, nothing, [], None)

    # --------------------------------------------------------------------------------------------------- reductions

    @_naming
    def allreduce(self, tensors: list[Tensor], opts: Any) -> Work:
        (tensor,) = tensors
        reduction = Reduction.of(opts.reduceOp, tensor.dtype, self._count)
        staged = on_host(tensor, reduction.dtype)
        # In pieces that stay in the caches, see PIECE_BYTES.
        pieces = torch.split(staged.view(-1), PIECE_BYTES * self._count // staged.element_size())
        calls = [(MPI.IN_PLACE, described(piece, reduction.datatype), reduction.op) for piece in pieces]
        return self._do("Allreduce", calls, opts, partial(reduction.finish, staged, tensor), tensors, staged)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> Work:
        return MpiWorks([self.allreduce([tensor], opts) for tensor in tensors])

    @_naming
    def reduce(self, tensors: list[Tensor], opts: Any) -> Work:
        (tensor,) = tensors
        reduction = Reduction.of(opts.reduceOp, tensor.dtype, self._count)
        staged = on_host(tensor, reduction.dtype)
        message = described(staged, reduction.datatype)
        is_root = self._own == opts.rootRank
        # Only the root has an outcome: it reduces in place, the others just send.
        buffers = (MPI.IN_PLACE, message) if is_root else (message, None)
        finish = partial(reduction.finish, staged, tensor) if is_root else nothing
        return self._do("Reduce", [(*buffers, reduction.op, opts.rootRank)], opts, finish, tensors, staged)

    @_naming
    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Work:
        (parts,) = inputs
        dtype = Reduction.of(opts.reduceOp, outputs[0].dtype, self._count).dtype
        return self._reduce_scatter(outputs, in_a_row(parts, dtype), self._shares(parts), opts)

    @_naming
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> Work:
        return self._reduce_scatter([output], input, [input.numel() // self._count] * self._count, opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Work:
        pairs = zip(outputs, inputs, strict=True)
        return MpiWorks([self.reduce_scatter_single(output, input, opts) for output, input in pairs])

    def _reduce_scatter(self, outputs: list[Tensor], row: Tensor, counts: list[int], opts: Any) -> Work:
        """Reduce ``row``, which holds ``counts`` elements for each rank."""
        (output,) = outputs
        check_sizes(counts, self._count, row.numel())
        check_own(output.numel(), counts[self._own])
        reduction = Reduction.of(opts.reduceOp, output.dtype, self._count)
        sent, received = on_host(row, reduction.dtype), on_host(output, reduction.dtype)
        messages = described(sent, reduction.datatype), described(received, reduction.datatype)
        finish = partial(reduction.finish, received, output)
        return self._do("Reduce_scatter", [(*messages, counts, reduction.op)], opts, finish, outputs, (sent, received))

    # ------------------------------------------------------------------------------------------ gather and scatter

    @_naming
    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        """Gather one tensor. torch 2.6 gives no ``opts``."""
        (tensors,), (tensor,) = outputs, inputs
        sent, received, counts = on_host(tensor), room(tensors, tensor.dtype), self._shares(tensors)
        check_own(tensor.numel(), counts[self._own])
        finish = partial(give_back_row, received, tensors)
        arguments = (described(sent), described(received, counts=counts))
        return self._do("Allgatherv", [arguments], opts, finish, tensors, (sent, received))

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        """Gather several tensors. ``outputs`` holds a list for each rank. torch 2.6 gives no ``opts``."""
        by_tensor = zip(zip(*outputs, strict=True), inputs, strict=True)
        return MpiWorks([self.allgather([list(tensors)], [tensor], opts) for tensors, tensor in by_tensor])

    @_naming
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any) -> Work:
        check_sizes([input.numel()] * self._count, self._count, output.numel())
        sent, received = on_host(input), on_host(output)
        # The input may be this rank's part of the output: MPI forbids the same memory on both sides.
        is_in_place = sent.data_ptr() == received.data_ptr() + self._own * sent.nbytes
        memory, _, datatype = described(received)
        from_each = [memory, sent.numel(), datatype]
        arguments = (MPI.IN_PLACE if is_in_place else described(sent), from_each)
        finish = partial(give_back, received, output)
        return self._do("Allgather", [arguments], opts, finish, [output], (sent, received))

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        """Gather several tensors, each into one. torch 2.11 gives no ``opts``."""
        pairs = zip(outputs, inputs, strict=True)
        return MpiWorks([self.all_gather_single(output, input, opts) for output, input in pairs])

    @_naming
    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Work:
        (tensor,), tensors = inputs, outputs[0] if self._own == opts.rootRank else []
        # Only the root receives.
        sent, received = on_host(tensor), room(tensors, tensor.dtype)
        into = described(received, counts=self._shares(tensors)) if tensors else None
        finish = partial(give_back_row, received, tensors)
        return self._do("Gatherv", [(described(sent), into, opts.rootRank)], opts, finish, tensors, (sent, received))

    @_naming
    def gather_single(self, output: Tensor, input: Tensor, opts: Any) -> Work:
        is_root = self._own == opts.rootRank
        return self.gather([list(output.chunk(self._count))] if is_root else [], [input], opts)

    @_naming
    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Work:
        (output,), parts = outputs, inputs[0] if self._own == opts.rootRank else []
        # Only the root sends.
        sent, received = in_a_row(parts) if parts else None, on_host(output)
        source = None if sent is None else described(sent, counts=self._shares(parts))
        calls = [(source, described(received), opts.rootRank)]
        finish = partial(give_back, received, output)
        return self._do("Scatterv", calls, opts, finish, outputs, (sent, received))

    def _shares(self, tensors: Sequence[Tensor]) -> list[int]:
        counts = sizes(tensors)
        check_sizes(counts, self._count, sum(counts))
        return counts

    # -------------------------------------------------------------------------------------------------- all to all

    @_naming
    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Work:
        sent, received = in_a_row(inputs), room(outputs, outputs[0].dtype)
        arguments = (described(sent, counts=self._shares(inputs)), described(received, counts=self._shares(outputs)))
        finish = partial(give_back_row, received, outputs)
        return self._do("Alltoallv", [arguments], opts, finish, outputs, (sent, received))

    @_naming
    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: list[int] | None, input_splits: list[int] | None, opts: Any
    ) -> Work:
        sent, received = on_host(input), on_host(output)
        arguments = (self._split(sent, input_splits), self._split(received, output_splits))
        finish = partial(give_back, received, output)
        return self._do("Alltoallv", [arguments], opts, finish, [output], (sent, received))

    def _split(self, tensor: Tensor, splits: list[int] | None) -> list[Any]:
        """Describe ``splits`` rows of ``tensor`` for or from each rank. Without ``splits`` each has equally many."""
        rows = tensor.shape[0] if tensor.dim() else 1
        splits = splits or [rows // self._count] * self._count
        check_sizes(splits, self._count, rows)
        return described(tensor, counts=[split * (tensor.numel() // max(rows, 1)) for split in splits])

    # ---------------------------------------------------------------------------------------------- point to point

    @_naming
    def send(self, tensors: list[Tensor], destination: int, tag: int) -> Work:
        staged = on_host(tensors[0])
        request = self._comm.Isend(described(staged), destination, tag)
        return self._start("send", request, nothing, tensors, self._limit_s, staged)

    @_naming
    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Work:
        staged = on_host(tensors[0])
        request = self._comm.Irecv(described(staged), source, tag)
        return self._start("recv", request, partial(give_back, staged, tensors[0]), tensors, self._limit_s, staged)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Work:
        return self.recv(tensors, MPI.ANY_SOURCE, tag)

    # The names of these in torch < 2.15.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
    recvAnysource = recv_anysource


#: Open MPI spins while it waits. With more threads than cores (data workers, a second thread of ours), the ranks that
#: it waits for would lose whole time slices: 25 MB took 26 ms instead of 10 on a busy machine.
YIELD_VARIABLE = "OMPI_MCA_mpi_yield_when_idle"


def register() -> str:
    """Make the backend known to torch and return its name."""
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(
            NAME, _create, extended_api=True, devices=[*dict.fromkeys(("cpu", accelerator.built_for().type))]
        )
    return NAME


def launch_key(rank: int, size: int) -> str:
    """Return a name that all ranks of this launch have, and no other launch. Every rank must call it."""
    open_mpi(rank, size)
    return str(MPI.COMM_WORLD.bcast(secrets.token_hex(8)))


def _create(options: Any, _: object) -> MpiGroup:
    """Open a group, on its members. torch gives an empty list of ranks for the default group."""
    ranks = list(options.global_ranks_in_group)
    # Each group gets its own communicator, so that its messages never meet those of another group. The default group
    # comes first, and opens MPI unless that has happened.
    if not ranks:
        open_mpi(options.group_rank, options.group_size)
        store_barrier(options.store, options.group_rank, options.group_size)
        return MpiGroup(MPI.COMM_WORLD.Dup(), options.group_rank, options.timeout)
    members = MPI.COMM_WORLD.Get_group().Incl(ranks)
    return MpiGroup(MPI.COMM_WORLD.Create_group(members), ranks[options.group_rank], options.timeout)


def open_mpi(rank: int, size: int) -> None:
    if not MPI.Is_initialized():
        os.environ.setdefault(YIELD_VARIABLE, "1")
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    check_world((rank, size), (MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()), MPI.Get_library_version())
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise ConfigError(
            "dist.backend: mpi needs MPI_THREAD_MULTIPLE, which this MPI was not built or not opened with "
            f"({_first_line(MPI.Get_library_version())}); use another MPI, or dist.backend: gloo"
        )


def store_barrier(store: dist.Store, rank: int, size: int) -> None:
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
