"""Tensors that a model changes as it trains and that no ``state_dict()`` has."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from toolkit.checkpoint.tensors import to_bytes

#: Larger tensors are not looked at: a digest takes a second for each GiB.
MOST_BYTES = 64 << 20


class Unsaved:
    """The plain attributes and buffers of modules that no checkpoint holds, as they were when this was made.

    What is no state is left out: a tensor that is made or grows at the first batch is a cache, and one with a gradient
    is an output that the module keeps. So are sparse and quantized tensors, and very large ones, which would take time.
    """

    def __init__(self, modules: Mapping[str, nn.Module], handed_over: Iterable[object]) -> None:
        """``modules`` have the prefixes of their names in a checkpoint. What is in ``handed_over`` is saved."""
        self._parts = [
            (f"{prefix}{path}." if path else prefix, part)
            for prefix, module in modules.items()
            for path, part in module.named_modules()
            # Torch's own modules keep no state there, and what a module saves by methods of its own is not known.
            if not type(part).__module__.startswith("torch.") and not _saves_by_itself(part)
        ]
        self._saved = {id(value) for value in handed_over}
        self._first = {name: _digest(tensor) for name, tensor in self._now()}

    def changed(self) -> list[str]:
        """Return the names of those with another content than at first."""
        now = dict(self._now())
        return [name for name, digest in self._first.items() if name in now and _is_other(now[name], digest)]

    def _now(self) -> Iterator[tuple[str, Tensor]]:
        for place, part in self._parts:
            buffers = {name: part._buffers.get(name) for name in part._non_persistent_buffers_set}
            for name, value in {**vars(part), **buffers}.items():
                if type(value) is Tensor and _is_small_and_dense(value) and id(value) not in self._saved:
                    yield f"{place}{name}", value


def _is_small_and_dense(tensor: Tensor) -> bool:
    is_dense = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta
    return is_dense and not tensor.requires_grad and tensor.nbytes <= MOST_BYTES


Digest = tuple[object, ...]


def _digest(tensor: Tensor) -> Digest:
    return (tensor.shape, tensor.dtype, zlib.crc32(to_bytes("an attribute", tensor)))


def _is_other(tensor: Tensor, digest: Digest) -> bool:
    return (tensor.shape, tensor.dtype) == digest[:2] and _digest(tensor) != digest


def _saves_by_itself(part: nn.Module) -> bool:
    kind = type(part)
    return any(
        getattr(kind, name) is not getattr(nn.Module, name)
        for name in ("get_extra_state", "_save_to_state_dict", "state_dict")
    )
