"""Whole tensors of a checkpoint, however many ranks wrote it, for readers without a strategy and a process group."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from toolkit import logs
from toolkit.checkpoint import tensors
from toolkit.checkpoint.manifest import CorruptCheckpointError, Manifest, TensorRecord
from toolkit.checkpoint.store import CheckpointStore
from toolkit.errors import CheckpointError

log = logs.get(__name__)
T = TypeVar("T")

#: Under this prefix a strategy's state has the model's tensors, by their names in the unparallelised model.
MODEL = "model/"
#: Under this one the moving averages of those that have one.
EMA = "ema/"


def model_tensors(manifest: Manifest, *, ema: bool = False) -> dict[str, TensorRecord]:
    """The records of the model alone, by the model's own names; with ``ema`` moving averages where there are some.

    (There are averages of buffers, too, that a model makes for itself and does not save.)
    """
    found, averages = _below(MODEL, manifest), _below(EMA, manifest)
    return {name: averages.get(name, record) if ema else record for name, record in found.items()}


def has_ema(manifest: Manifest) -> bool:
    """Whether the checkpoint holds a moving average of the weights."""
    return bool(_below(EMA, manifest))


def _below(prefix: str, manifest: Manifest) -> dict[str, TensorRecord]:
    found = manifest.tensors.items()
    return {name.removeprefix(prefix): record for name, record in found if name.startswith(prefix)}


def read(folder: Path, name: str, record: TensorRecord) -> torch.Tensor:
    """The global tensor on the CPU. CorruptCheckpointError when a byte of it is wrong; ``name`` is for the message."""
    tensor = torch.empty(record.shape, dtype=dtype_of(folder, name, record))
    tensors.assemble(name, tensor, (0,) * tensor.dim(), folder, record.parts)
    return tensor


def dtype_of(folder: Path, name: str, record: TensorRecord) -> torch.dtype:
    """The tensor's type, and that its parts have the bytes for it: asked before memory is taken."""
    dtype = getattr(torch, record.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"{folder}: {name} is of type {record.dtype}, which torch {torch.__version__} has not")
    if any(part.size_bytes != math.prod(part.shape) * dtype.itemsize for part in record.parts):
        raise CorruptCheckpointError(f"{folder}: {name} has not as many bytes as {record.dtype} {record.shape} needs")
    return dtype


def from_newest(paths: Sequence[Path], use: Callable[[Path, Manifest], T]) -> tuple[Path, T]:
    """What ``use`` makes of the first of ``paths``, checkpoints newest first, in which it finds no damage.

    Nothing is moved or removed: a run may be writing beside it. CheckpointError when none is good.
    """
    reasons = list[str]()
    for path in paths:
        try:
            return path, use(path, CheckpointStore(path.parent).manifest(path))
        except CorruptCheckpointError as error:
            log.warning("%s is damaged, the next older one is tried: %s", path.name, error)
            reasons.append(f"\n  {path}: {error}")
    raise CheckpointError(f"none of {len(reasons)} checkpoints is good:{''.join(reasons)}")
