"""Whole tensors of a checkpoint, however many ranks wrote it, for readers without a strategy and a process group."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from toolkit import logs
from toolkit.checkpoint import tensors
from toolkit.checkpoint.manifest import CorruptCheckpointError, Manifest, TensorRecord
from toolkit.checkpoint.store import CheckpointStore
from toolkit.errors import CheckpointError, RequestError

log = logs.get(__name__)
T = TypeVar("T")

#: Under this prefix a strategy's state has the model's tensors, by their names in the unparallelised model.
MODEL = "model/"
#: Under this one the moving averages of those that have one.
EMA = "ema/"


#: Which weights of a model: their moving average, or those that the optimizer has.
AVERAGE, RAW = "average", "raw"


def judged(manifest: Manifest) -> str:
    """Return which weights the run's own figures are of: the average where there is one."""
    return AVERAGE if _below(EMA, manifest.tensors) else RAW


def model_tensors(found: Mapping[str, T], weights: str | None = None) -> tuple[str, dict[str, T]]:
    """Return which weights of the model were chosen, and their records, or tensors, by the model's own names.

    ``found`` has all that a checkpoint holds; ``weights`` is AVERAGE, RAW or, None, the average where there is one.
    Raises RequestError for an average that is not there. (There are averages of buffers, too, that a model makes for
    itself and does not save: only what the model has is returned.)
    """
    raw, averages = _below(MODEL, found), _below(EMA, found)
    if weights == AVERAGE and not averages:
        raise RequestError("there is no moving average of the weights (train.ema_decay was not set); ask for raw ones")
    chosen = weights or (AVERAGE if averages else RAW)
    return chosen, {name: averages.get(name, one) if chosen == AVERAGE else one for name, one in raw.items()}


def _below(prefix: str, found: Mapping[str, T]) -> dict[str, T]:
    return {name.removeprefix(prefix): one for name, one in found.items() if name.startswith(prefix)}


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
