"""Tensors to raw little-endian bytes and back, bit for bit, for every dense type that torch has."""

from __future__ import annotations

import sys
import zlib
from pathlib import Path

import torch

from toolkit.checkpoint.manifest import (
    CorruptCheckpointError,
    Part,
    check_crc,
    open_part,
    unreadable_is_corrupt,
)
from toolkit.errors import CheckpointError


def dtype_name(tensor: torch.Tensor) -> str:
    """`float32`, `bfloat16`, ...: torch's name without the module."""
    return str(tensor.dtype).removeprefix("torch.")


def to_bytes(name: str, tensor: torch.Tensor) -> memoryview:
    """The elements in C order. Of a contiguous CPU tensor it is the memory itself, so read it before the next step."""
    _check_plain(name, tensor)
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().data


def _check_plain(name: str, tensor: torch.Tensor) -> None:
    """CheckpointError for what has no elements in C order on this rank, or another byte order."""
    if tensor.layout is not torch.strided or tensor.is_quantized or type(tensor.detach()) is not torch.Tensor:
        raise CheckpointError(
            f"{name} is a {type(tensor).__name__} of layout {tensor.layout}; declare dense local tensors "
            "(of a DTensor its local part, as Sharded)"
        )
    if sys.byteorder != "little":
        raise CheckpointError("checkpoints are little-endian and this machine is not; it is not supported")


def fill(name: str, live: torch.Tensor, folder: Path, part: Part) -> None:
    """Read `part` into `live`, in place; CorruptCheckpointError, with `live` as it was, if the bytes are wrong."""
    staged = torch.empty(part.size_bytes, dtype=torch.uint8)
    _read(folder, part, staged.numpy().data)
    check_crc(folder, name, part, zlib.crc32(staged.numpy().data))
    target = live.detach()
    if target.is_contiguous():  # as bytes: some types of torch (int1) have no copy of their own
        target.view(-1).view(torch.uint8).copy_(staged)
    else:
        target.copy_(staged.view(live.dtype).reshape(live.shape))


def _read(folder: Path, part: Part, target: memoryview) -> None:
    """Fill `target` from the file; one read may return less than was asked for."""
    with unreadable_is_corrupt(folder / part.file), open_part(folder, part) as file:
        done = 0
        while done < part.size_bytes:
            got = file.readinto(target[done:])
            if not got:
                raise CorruptCheckpointError(f"{folder / part.file} ends at byte {part.start + done}")
            done += got
