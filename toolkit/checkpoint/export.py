"""A checkpoint as a file for other programs: safetensors, torch.save's, or torch's DCP folder.

The digest of every byte read is verified, and tensors that were sharded over ranks are whole again. A safetensors file
is written one tensor at a time. The other two writers need all tensors in memory.
"""

from __future__ import annotations

import itertools
import json
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from toolkit import __version__
from toolkit.base import fsio
from toolkit.base.errors import CheckpointError, listing
from toolkit.checkpoint import header, tensors, whole
from toolkit.checkpoint.manifest import Manifest, TensorRecord


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

    Returns the number of tensors, and which: AVERAGE, RAW or "all".

    The model's tensors get the model's own names, so that ``model.load_state_dict`` takes them; ``weights`` as in
    ``whole.model_tensors``. ``everything``: all tensors under the checkpoint's names (``model/...``, ``optim/...``),
    and the values that are not tensors where ``form`` can hold them unpickled: not in a DCP folder. Raises
    CorruptCheckpointError for damage, CheckpointError where there is nothing to write or it cannot be written.
    """
    chosen, records = whole.model_tensors(manifest.tensors, weights)
    if everything:
        chosen, records = "all", dict(manifest.tensors)
    if not records:
        there = listing(sorted(manifest.tensors)) or "none"
        raise CheckpointError(f"{folder} has no tensors named {whole.MODEL}..., see --all; there are: {there}")
    content = _Content(folder, manifest, records, run, chosen)
    try:
        with fsio.new_path(target) as temporary:
            _WRITERS[form](temporary, content)
    except (OSError, RuntimeError) as error:
        # torch hides the system's error behind a RuntimeError of its own: look for the cause.
        cause = error if isinstance(error, OSError) else error.__cause__ or error.__context__ or error
        reason = str(cause).strip().split("\n")[-1]
        raise CheckpointError(
            f"writing {target} failed ({reason}); free space there, or choose another place"
        ) from error
    return len(records), chosen


class _Content:
    """The tensors and values to be written, and what the file says about itself."""

    def __init__(
        self, folder: Path, manifest: Manifest, records: Mapping[str, TensorRecord], run: str, chosen: str
    ) -> None:
        self.folder = folder
        self.records = records
        self.values = {name: record.value for name, record in manifest.values.items()} if chosen == "all" else {}
        about = {"step": str(manifest.step), "run": run, "weights": chosen, "toolkit": __version__}
        self.about = {**about, **manifest.versions}

    def tensor(self, name: str) -> torch.Tensor:
        """Read one tensor now."""
        return whole.read(self.folder, name, self.records[name])

    def tensors(self) -> dict[str, torch.Tensor]:
        """Read all tensors at once."""
        return {name: self.tensor(name) for name in self.records}


def _write_safetensors(path: Path, content: _Content) -> None:
    """Write a safetensors file. Wide dtypes come first, as in the package's own writer, to align every tensor."""
    dtypes = {name: whole.dtype_of(content.folder, name, record) for name, record in content.records.items()}
    # Stored as bytes instead, such a tensor could not be loaded into a model.
    for name, dtype in dtypes.items():
        if dtype not in header.TYPES:
            kind = content.records[name].dtype
            raise CheckpointError(f"{name} is of type {kind}, which safetensors has not; export to a .pt file")
    names = sorted(dtypes, key=lambda name: (-dtypes[name].itemsize, name))
    about = content.about | ({"values": json.dumps(content.values)} if content.values else {})
    about["format"] = "pt"  # without it transformers refuses the file
    head = header.encode({name: (dtypes[name], content.records[name].shape) for name in names}, about)
    data = (tensors.to_bytes(name, content.tensor(name)) for name in names)
    fsio.write_stream(path, itertools.chain([head], data))


def _write_torch(path: Path, content: _Content) -> None:
    with os.fdopen(fsio.open_private(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
        torch.save(content.tensors() | content.values, file)


def _write_dcp(path: Path, content: _Content) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    found = content.tensors()
    try:
        with warnings.catch_warnings(action="ignore"):  # about the missing process group
            save(found, storage_writer=FileSystemWriter(fsio.make_dir(path)), no_dist=True)
    except CheckpointException as error:  # not a subclass of Exception
        raise RuntimeError(str(error)) from None


_WRITERS: Mapping[str, Callable[[Path, _Content], None]] = {
    "safetensors": _write_safetensors,
    "torch": _write_torch,
    "dcp": _write_dcp,
}
