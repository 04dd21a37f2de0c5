"""Tensors as MPI reads and writes them, and how MPI reduces them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

from toolkit.devices.accelerator import module_of

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
    """Return the elements of ``tensor`` in a row, where MPI can read them.

    That is the tensor's own memory if they lie so, else a copy.
    """
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
    """Return mpi4py's description of ``tensor``'s memory.

    ``counts`` are the elements for or from each rank, in a row.
    """
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
