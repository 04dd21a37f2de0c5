"""The header of a safetensors file: each tensor's name, dtype, shape and place.

A file is the header's length in 8 bytes, the header as JSON, and the tensors end to end. The format is described at
https://huggingface.co/docs/safetensors. The package's own writer needs all tensors in memory; a header needs none.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

#: safetensors' names of the dtypes that it has.
TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64", torch.bool: "BOOL",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
}  # fmt: skip


def encode(tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], about: Mapping[str, str] = {}) -> bytes:
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
