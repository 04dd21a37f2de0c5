"""Tensors to raw little-endian bytes and back, bit for bit, for every dense dtype; the header of a safetensors file.

Such a file is the header's length in 8 bytes, the header as JSON (each tensor's name, dtype, shape and place), and the
tensors end to end. The format is described at https://huggingface.co/docs/safetensors. The package's own writer needs
all tensors in memory; a header needs none.
"""

from __future__ import annotations

import json
import math
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from toolkit.base.errors import CheckpointError, UnsavableStateError
from toolkit.checkpoint.manifest import CorruptCheckpointError, TensorPart, check_crc, open_part, unreadable_is_corrupt


def dtype_name(tensor: torch.Tensor) -> str:
    """Return torch's name of the dtype without the module: `float32`, `bfloat16`, ..."""
    return str(tensor.dtype).removeprefix("torch.")


def to_bytes(name: str, tensor: torch.Tensor) -> memoryview:
    """Return the elements in C order. For a contiguous CPU tensor this is its memory: read it before the next step."""
    check_plain(name, tensor)
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return as_bytes(plain).numpy().data


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as its bytes, in one dimension."""
    # One element, or none, is contiguous with any stride, and torch views only a stride of 1 as bytes.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def other_than_plain(tensor: torch.Tensor) -> str:
    """Return what keeps the tensor from being saved as its elements; empty for one that is plain, dense and local."""
    if tensor.layout is not torch.strided:
        return f"a sparse tensor ({tensor.layout})"
    if tensor.is_quantized:
        return f"a quantized tensor ({tensor.dtype})"
    if tensor.is_meta:
        return "on the meta device, without values"
    kind = type(tensor.detach())
    return "" if kind is torch.Tensor else f"a {kind.__qualname__}"


def check_plain(name: str, tensor: torch.Tensor) -> None:
    """Raise CheckpointError unless the tensor is plain, dense and local. The machine must be little-endian."""
    if what := other_than_plain(tensor):
        raise UnsavableStateError(
            f"{name} is {what}; declare dense local tensors (of a DTensor its local part, as Sharded)"
        )
    if sys.byteorder != "little":
        raise CheckpointError("checkpoints are little-endian and this machine is not; it is not supported")


def fill(name: str, live: torch.Tensor, folder: Path, part: TensorPart) -> None:
    """Read `part` into `live`, in place. Raises CorruptCheckpointError, with `live` unchanged, for wrong bytes."""
    staged = _verified(name, folder, part)
    target = live.detach()
    if target.is_contiguous():  # as bytes: some dtypes of torch (int1) have no copy of their own
        as_bytes(target).copy_(staged)
    else:
        target.copy_(staged.view(live.dtype).reshape(live.shape))


def assemble(
    name: str, live: torch.Tensor, offsets: tuple[int, ...], folder: Path, parts: Iterable[TensorPart]
) -> None:
    """Fill `live`, which begins at `offsets` of the global tensor, from all overlapping `parts`.

    The parts may be cut in any way. Each overlapping part is read whole, once, and used only if its crc32 is right; one
    is in memory at a time. Raises CorruptCheckpointError, with `live` filled in part, if the bytes of one are wrong.
    """
    target = live.detach()
    # Rows of bytes need contiguous memory: other tensors are filled by way of a copy.
    whole = target if target.is_contiguous() else torch.empty(target.shape, dtype=target.dtype, device=target.device)
    for part in parts:
        meeting = _meeting(offsets, tuple(live.shape), part.offsets, part.shape)
        if meeting is not None:
            here, there = meeting
            staged = _verified(name, folder, part)
            _rows(whole, tuple(live.shape))[here].copy_(_rows(staged, part.shape)[there])
            del staged  # before the next one is read
    if whole is not target:
        target.copy_(whole)


def _rows(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """View a contiguous tensor of `shape` as bytes. One more dimension has the bytes of an element."""
    return as_bytes(tensor).view(*shape, -1)


def _meeting(
    start: tuple[int, ...], shape: tuple[int, ...], other_start: tuple[int, ...], other_shape: tuple[int, ...]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return the overlap of two rectangles of a tensor, as slices of each. None if there is none."""
    here, there = list[slice](), list[slice]()
    for a, n, b, m in zip(start, shape, other_start, other_shape, strict=True):
        low, high = max(a, b), min(a + n, b + m)
        if low >= high:
            return None
        here.append(slice(low - a, high - a))
        there.append(slice(low - b, high - b))
    return tuple(here), tuple(there)


def _verified(name: str, folder: Path, part: TensorPart) -> torch.Tensor:
    """Return the bytes of `part`. Raises CorruptCheckpointError if the crc32 is wrong."""
    staged = torch.empty(part.size_bytes, dtype=torch.uint8)
    target, done = staged.numpy().data, 0
    with unreadable_is_corrupt(folder / part.file), open_part(folder, part) as file:
        while done < part.size_bytes:  # one read may return less than was asked for
            got = file.readinto(target[done:])
            if not got:
                raise CorruptCheckpointError(f"{folder / part.file} ends at byte {part.start + done}")
            done += got
    check_crc(folder, name, part, zlib.crc32(target))
    return staged


#: safetensors' names of the dtypes that it has.
TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64", torch.bool: "BOOL",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
}  # fmt: skip


def encode_header(tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], about: Mapping[str, str] = {}) -> bytes:
    """Return the safetensors header of a file that holds ``tensors`` in this order.

    Each is given by a dtype and a shape. If wide dtypes come first, every tensor is aligned to its width. ``about`` is
    what the file says about itself. A tensor of a dtype that safetensors lacks is stored as bytes, with one more
    dimension for the bytes of an element.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **about}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        stored = shape if dtype in TYPES else (*shape, dtype.itemsize)
        header[name] = {"dtype": TYPES.get(dtype, "U8"), "shape": stored, "data_offsets": (start, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
