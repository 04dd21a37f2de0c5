"""Whole tensors of a checkpoint from any number of ranks. Readers need no strategy and no process group.

The digest of every byte read is verified, and tensors that were sharded over ranks are whole again. They are exported
for other programs as safetensors, torch.save's file, or torch's DCP folder. A safetensors file is written one tensor at
a time; the other two writers need all tensors in memory.
"""

from __future__ import annotations

import itertools
import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from toolkit import __version__
from toolkit.base import fsio, logs
from toolkit.base.errors import CheckpointError, RequestError, listing
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


def evaluated_weights(manifest: Manifest) -> str:
    """Return which weights the run's own metrics are of: the average where there is one."""
    return model_tensors(manifest.tensors)[0]


def model_tensors(found: Mapping[str, T], weights: str | None = None) -> tuple[str, dict[str, T]]:
    """Return which weights were chosen, and their entries by the model's own names.

    ``found`` maps all names of a checkpoint to records or tensors. ``weights`` is AVERAGE, RAW or None: the average
    where there is one. Raises RequestError for an average that is not there. Only names that the model's tensors have
    are returned: there are averages of buffers, too, that a model makes for itself and does not save.
    """
    raw = {name.removeprefix(MODEL): one for name, one in found.items() if name.startswith(MODEL)}
    averages = {name: found[EMA + name] for name in raw if EMA + name in found}
    if weights == AVERAGE and not averages:
        raise RequestError(
            "there is no moving average of the model's weights (train.ema_decay was not set, or a loop of its own "
            "averages another model); ask for raw ones"
        )
    chosen = weights or (AVERAGE if averages else RAW)
    if chosen == RAW:
        return chosen, raw
    return chosen, {name: averages.get(name, one) for name, one in raw.items()}


def deviation(name: str, *places: tuple[Path, TensorRecord]) -> str:
    """Return how two tensors of this name differ: by their types and shapes, else by how much."""
    one, two = (read(folder, name, record) for folder, record in places)
    kinds = [f"{tensors.dtype_name(each)} {list(each.shape)}" for each in (one, two)]
    if kinds[0] != kinds[1]:
        return " and ".join(kinds)
    wide = torch.complex128 if one.is_complex() else torch.float64
    apart = (one.to(wide) - two.to(wide)).abs()
    return f"{kinds[0]} differs by {apart.max():.3g} at most, {apart.mean():.3g} in the mean"


def read(folder: Path, name: str, record: TensorRecord) -> torch.Tensor:
    """Return the global tensor on the CPU. Raises CorruptCheckpointError if a byte is wrong; messages say ``name``."""
    tensor = torch.empty(record.shape, dtype=_dtype_of(folder, name, record))
    tensors.assemble(name, tensor, (0,) * tensor.dim(), folder, record.parts)
    return tensor


def _dtype_of(folder: Path, name: str, record: TensorRecord) -> torch.dtype:
    """Return the tensor's dtype. Raises CheckpointError for a dtype that this torch lacks."""
    dtype = getattr(torch, record.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"{folder}: {name} is of type {record.dtype}, which torch {torch.__version__} has not")
    return dtype


def from_newest(paths: Sequence[Path], use: Callable[[Path, Manifest], T]) -> tuple[Path, T]:
    """Return the first of ``paths`` without damage, and the result of ``use`` for it.

    ``paths`` are checkpoints, newest first. Nothing is moved or removed: a run may be writing there. Raises
    CheckpointError when none is good.
    """
    reasons = list[str]()
    for path in paths:
        try:
            return path, use(path, CheckpointFolder(path.parent).manifest(path))
        except CorruptCheckpointError as error:
            log.warning("%s is damaged, the next older one is tried: %s", path.name, error)
            reasons.append(f"\n  {path}: {error}")
    raise CheckpointError(f"none of {len(reasons)} checkpoints is usable:{''.join(reasons)}")


def export(
    folder: Path,
    manifest: Manifest,
    target: Path,
    form: str,
    *,
    run: str,
    everything: bool = False,
    weights: str | None = None,
) -> tuple[int, str]:
    """Write the checkpoint in ``folder`` as the new ``target``, all or nothing.

    ``form`` is safetensors, torch or dcp. Returns the number of tensors, and which: AVERAGE, RAW or "all".

    The model's tensors get the model's own names, so that ``model.load_state_dict`` takes them; ``weights`` as in
    ``whole.model_tensors``. ``everything``: all tensors under the checkpoint's names (``model/...``, ``optim/...``),
    and the values that are not tensors where ``form`` can hold them unpickled: not in a DCP folder, whose names are
    those of torch's recipe (``model.<name>``, ``optim.state.<parameter>.<slot>``). Raises CorruptCheckpointError for
    damage, CheckpointError where there is nothing to write or it cannot be written.
    """
    chosen, records = model_tensors(manifest.tensors, weights)
    if everything:
        chosen, records = "all", dict(manifest.tensors)
    if not records:
        there = listing(sorted(manifest.tensors)) or "none"
        raise CheckpointError(f"{folder} has no tensors named {MODEL}..., see --all; there are: {there}")
    values = {name: record.value for name, record in manifest.values.items()} if everything else {}
    try:
        with fsio.atomic_path(target) as temporary:
            if form == "safetensors":
                about = {"step": str(manifest.step), "run": run, "weights": chosen, "toolkit": __version__}
                about |= manifest.versions
                about |= {"values": json.dumps(values)} if values else {}
                _write_safetensors(temporary, folder, records, about)
            else:
                found = {name: read(folder, name, record) for name, record in records.items()}
                if form == "dcp":
                    _write_dcp(temporary, _nested(found) if everything else found)
                else:
                    fd = fsio.open_private(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
                    with os.fdopen(fd, "wb") as file:
                        torch.save(found | values, file)
    except (OSError, RuntimeError) as error:
        # torch hides the system's error behind a RuntimeError of its own: look for the cause.
        cause = error if isinstance(error, OSError) else error.__cause__ or error.__context__ or error
        reason = str(cause).strip().split("\n")[-1]
        raise CheckpointError(
            f"writing {target} failed ({reason}); free space there, or choose another place"
        ) from error
    return len(records), chosen


def _write_safetensors(path: Path, folder: Path, records: Mapping[str, TensorRecord], about: Mapping[str, str]) -> None:
    """Write a safetensors file. Wide dtypes come first, as in the package's own writer, to align every tensor."""
    dtypes = {name: _dtype_of(folder, name, record) for name, record in records.items()}
    # Stored as bytes instead, such a tensor could not be loaded into a model.
    for name, dtype in dtypes.items():
        if dtype not in tensors.TYPES:
            kind = records[name].dtype
            raise CheckpointError(f"{name} is of type {kind}, which safetensors does not support; export to a .pt file")
    names = sorted(dtypes, key=lambda name: (-dtypes[name].itemsize, name))
    about = {**about, "format": "pt"}  # without it transformers refuses the file
    head = tensors.encode_header({name: (dtypes[name], records[name].shape) for name in names}, about)
    data = (tensors.to_bytes(name, read(folder, name, records[name])) for name in names)
    fsio.write_stream(path, itertools.chain([head], data))


def _write_dcp(path: Path, found: Mapping[str, Any]) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        with warnings.catch_warnings(action="ignore"):  # about the missing process group
            save(dict(found), storage_writer=FileSystemWriter(fsio.make_dir(path)))
    except CheckpointException as error:  # not a subclass of Exception
        raise RuntimeError(str(error)) from None


def _nested(found: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the tensors as torch's `get_state_dict` nests them: ``optim/<parameter>/<slot>`` is in optim's state."""
    nested: dict[str, Any] = {}
    for name, tensor in found.items():
        part, _, rest = name.partition("/")
        inner = nested.setdefault(part, {})
        if part == "optim" and "/" in rest:
            parameter, _, rest = rest.rpartition("/")
            inner = inner.setdefault("state", {}).setdefault(parameter, {})
        inner[rest] = tensor
    return nested
