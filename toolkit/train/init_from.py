"""Weights from another source, as a mapping from names to tensors on the CPU. No code in a file is ever run.

torch.save's files are read with ``weights_only``. torch's own loader of a DCP folder unpickles any ``.metadata``. Here
an unpickler reads it that knows only torch's few classes of metadata, and of the rest only tensors are read.
"""

from __future__ import annotations

import json
import pickle
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from toolkit.base import reading
from toolkit.base.errors import CheckpointError, ConfigError, RequestError
from toolkit.checkpoint import manifest as manifests
from toolkit.checkpoint import whole
from toolkit.checkpoint.folder import committed
from toolkit.checkpoint.manifest import Manifest
from toolkit.files import origin
from toolkit.files.origin import Origin
from toolkit.ranks.session import Session


class Weights(NamedTuple):
    """A model's tensors by name, their path, and which weights they are.

    ``which`` is ``whole.AVERAGE``, ``RAW``, or None if unknown.
    """

    path: Path
    tensors: dict[str, Tensor]
    which: str | None


def read_on_all_ranks(source: str, which: str | None, session: Session) -> Weights:
    """Read the weights, on all ranks from the file that rank 0 has chosen.

    In a run that is saving at this moment the other ranks might find a newer checkpoint.
    """
    read: list[Weights] = []  #: on rank 0, which alone calls ``look``

    def look() -> dict[str, str]:
        chosen = origin.find(source)
        try:
            read.append(read_weights(chosen, which))
        except RequestError as error:
            raise ConfigError(f"model.init_weights: {which}: {source}: {error}") from None
        kind = origin.CHECKPOINT if chosen.kind == origin.RUN else chosen.kind
        return {"kind": kind, "path": str(read[0].path)}

    choice = session.from_main("model.init_from", look)
    path = Path(choice["path"])
    # The path comes from the ranks' store: accept only one that the config names.
    if Path(source).is_absolute() and Path(source) not in (path, path.parent.parent):
        raise ConfigError(f"model.init_from: rank 0 cannot have read {path}, which is not in {source}")
    return read[0] if session.is_main else read_weights(Origin(choice["kind"], path), which)


def read_weights(source: Origin, which: str | None = None) -> Weights:
    """Read the weights; of a run those of its newest good checkpoint. ``which`` as in ``whole.model_tensors``.

    Raises CheckpointError when the source cannot be read, is damaged, or holds other things than tensors and plain
    values; RequestError for an average where there is none.
    """
    if source.kind == origin.RUN:
        path, found = whole.from_newest(
            committed(source.path / "checkpoints"), lambda path, manifest: _model(path, manifest, which)
        )
        return Weights(path, found[1], found[0])
    if source.kind == origin.CHECKPOINT:
        chosen, tensors = _model(source.path, manifests.read(source.path), which)
        return Weights(source.path, tensors, chosen)
    try:
        tensors = _READERS[source.kind](source.path)
    except Exception as error:  # each reader has errors of its own
        reason = str(error).strip().split("\n")[0]
        raise CheckpointError(
            f"{source.path} cannot be read as {source.kind}: {type(error).__name__}: {reason}; weights are tensors by "
            "their names, such as torch.save(model.state_dict(), path) writes"
        ) from error
    # Names without the toolkit's prefix come from another program: which weights they are is unknown.
    if which is None and not any(name.startswith(whole.MODEL) for name in tensors):
        return Weights(source.path, tensors, None)
    chosen, of_model = whole.model_tensors(tensors, which)  # an export of everything by this toolkit
    return Weights(source.path, of_model or tensors, chosen)


def _model(folder: Path, manifest: Manifest, which: str | None) -> tuple[str, dict[str, Tensor]]:
    manifests.check_sizes(folder, manifest)
    chosen, records = whole.model_tensors(manifest.tensors, which)
    return chosen, {name: whole.read(folder, name, record) for name, record in records.items()}


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


def _read_folder(path: Path) -> dict[str, Tensor]:
    """Read the safetensors files of a folder: those in its index, or its only one."""
    index = path / origin.INDEX_FILE
    if not index.is_file():
        return _read_safetensors(path / origin.WHOLE_FILE)
    names = sorted(set(json.loads(reading.read_bytes(index))["weight_map"].values()))
    tensors: dict[str, Tensor] = {}
    for name in names:
        if Path(name).name != name:
            raise CheckpointError(f"{index.name} names {name}, which is not a file of this folder")
        tensors |= _read_safetensors(path / name)
    return tensors


def _read_torch(path: Path) -> dict[str, Tensor]:
    found = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    # The tensors may be one level down, under one of these names.
    for key in ("state_dict", "model"):
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping):
        raise CheckpointError(f"it holds a {type(found).__name__}")
    return {str(name): value for name, value in found.items() if isinstance(value, Tensor)}


def _read_dcp(path: Path) -> dict[str, Tensor]:
    from torch.distributed.checkpoint import filesystem, state_dict_loader
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

    class Reader(filesystem.FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            return metadata

    with reading.open_file(path / ".metadata") as file:
        metadata: Metadata = _MetadataUnpickler(file).load()
    # Only the tensors are asked for: what else is in the folder is pickled.
    into = {
        name: torch.empty(record.size, dtype=record.properties.dtype)
        for name, record in metadata.state_dict_metadata.items()
        if isinstance(record, TensorStorageMetadata)
    }
    try:
        # The name that load() had before, which can do without the ranks' group on torch 2.6 as well.
        with warnings.catch_warnings(action="ignore"):  # about that name
            state_dict_loader.load_state_dict(into, Reader(path), no_dist=True)
    except CheckpointException as error:  # not a subclass of Exception
        raise RuntimeError(str(error).strip().split("\n")[-1]) from None
    # Nested, as torch's recipe and an export of everything are: by the names that a checkpoint has.
    places = metadata.planner_data or {}
    return {"/".join(map(str, places.get(name, (name,)))): tensor for name, tensor in into.items()}


class _MetadataUnpickler(pickle.Unpickler):
    """An unpickler for the classes in the ``.metadata`` of a DCP folder. It refuses all others."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
        if is_dtype or name in _METADATA_NAMES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in the metadata of tensors")


#: Names that torch writes, by module (2.13 and 2.15 were tried). Calling one only makes a value.
_METADATA_NAMES: Mapping[str, tuple[str, ...]] = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        *("TensorStorageMetadata", "ChunkStorageMetadata", "BytesStorageMetadata"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
    "collections": ("OrderedDict",),
    "pathlib": ("Path", "PosixPath", "PurePosixPath"),
    "pathlib._local": ("Path", "PosixPath", "PurePosixPath"),
}
_READERS = {
    origin.SAFETENSORS: _read_safetensors,
    origin.TORCH: _read_torch,
    origin.DCP: _read_dcp,
    origin.HUGGING_FACE: _read_folder,
}
