"""Whole tensors of a checkpoint from any number of ranks. Readers need no strategy and no process group."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from toolkit.base import logs
from toolkit.base.errors import CheckpointError, RequestError
from toolkit.checkpoint import tensors
from toolkit.checkpoint.folder import CheckpointFolder
from toolkit.checkpoint.manifest import CorruptCheckpointError, Manifest, TensorRecord

log = logs.get(__name__)
T = TypeVar("T")

#: Prefix of the model's tensors in a strategy's state. Their names are those in the unparallelized model.
MODEL = "model/"
#: Prefix of the moving averages, for tensors that have one.
EMA = "ema/"
#: Prefix of what a loss has learnt. It is trained with the model, which has no tensors of these names.
CRITERION = "criterion/"


#: Which weights of a model: their moving average, or those that the optimizer updates.
AVERAGE, RAW = "average", "raw"


def judged(manifest: Manifest) -> str:
    """Return which weights the run's own metrics are of: the average where there is one."""
    return model_tensors(manifest.tensors)[0]


def model_tensors(found: Mapping[str, T], weights: str | None = None) -> tuple[str, dict[str, T]]:
    """Return which weights were chosen, and their entries by the model's own names.

    ``found`` maps all names of a checkpoint to records or tensors. ``weights`` is AVERAGE, RAW or None: the average
    where there is one. Raises RequestError for an average that is not there. Only names that the model's tensors have
    are returned: there are averages of buffers, too, that a model makes for itself and does not save.
    """
    raw = _below(MODEL, found)
    averages = {name: one for name, one in _below(EMA, found).items() if name in raw}
    if weights == AVERAGE and not averages:
        raise RequestError(
            "there is no moving average of the model's weights (train.ema_decay was not set, or a loop of its own "
            "averages another model); ask for raw ones"
        )
    chosen = weights or (AVERAGE if averages else RAW)
    if chosen == RAW:
        return chosen, raw
    return chosen, {name: averages.get(name, one) for name, one in raw.items()}


def _below(prefix: str, found: Mapping[str, T]) -> dict[str, T]:
    return {name.removeprefix(prefix): one for name, one in found.items() if name.startswith(prefix)}


def read(folder: Path, name: str, record: TensorRecord) -> torch.Tensor:
    """Return the global tensor on the CPU. Raises CorruptCheckpointError if a byte is wrong; messages say ``name``."""
    tensor = torch.empty(record.shape, dtype=dtype_of(folder, name, record))
    tensors.assemble(name, tensor, (0,) * tensor.dim(), folder, record.parts)
    return tensor


def dtype_of(folder: Path, name: str, record: TensorRecord) -> torch.dtype:
    """Return the tensor's dtype. Raises CheckpointError for a dtype that this torch lacks.

    It is called before memory is allocated, and raises CorruptCheckpointError where the parts have another number of
    bytes than dtype and shape need.
    """
    dtype = getattr(torch, record.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"{folder}: {name} is of type {record.dtype}, which torch {torch.__version__} has not")
    if any(part.size_bytes != math.prod(part.shape) * dtype.itemsize for part in record.parts):
        raise CorruptCheckpointError(f"{folder}: {name} has not as many bytes as {record.dtype} {record.shape} needs")
    return dtype


def from_newest(paths: Sequence[Path], use: Callable[[Path, Manifest], T]) -> tuple[Path, T]:
    """Return the first of ``paths`` without damage, and the result of ``use`` for it.

    ``paths`` are checkpoints, newest first. Nothing is moved or removed: a run may be writing beside it. Raises
    CheckpointError when none is good.
    """
    reasons = list[str]()
    for path in paths:
        try:
            return path, use(path, CheckpointFolder(path.parent).manifest(path))
        except CorruptCheckpointError as error:
            log.warning("%s is damaged, the next older one is tried: %s", path.name, error)
            reasons.append(f"\n  {path}: {error}")
    raise CheckpointError(f"none of {len(reasons)} checkpoints is good:{''.join(reasons)}")
