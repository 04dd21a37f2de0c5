"""The weights that a new run starts from, if `model.init_from` names any. No code in a file is ever run.

torch.save's files are read with ``weights_only``. torch's own loader of a DCP folder unpickles any ``.metadata``. Here
an unpickler reads it that knows only torch's few classes of metadata, and of the rest only tensors are read.
"""

from __future__ import annotations

import json
import pickle
import warnings
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from toolkit import hang
from toolkit.base import fsio, logs
from toolkit.base.errors import CheckpointError, ConfigError, RequestError, did_you_mean, listing
from toolkit.checkpoint import manifest as manifests
from toolkit.checkpoint import whole
from toolkit.checkpoint.folder import committed
from toolkit.checkpoint.manifest import Manifest
from toolkit.config import ModelConfig
from toolkit.files import origin
from toolkit.files.origin import WeightsOrigin
from toolkit.ranks.session import Session
from toolkit.strategies.protocol import ModelFactory

#: What wrappers put in front of a model's names: DataParallel and DDP, torch.compile, a trainer's attribute.
_PREFIXES = ("module.", "model.")
_INFIXES = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")

log = logs.get(__name__)


def initialised(build: ModelFactory, config: ModelConfig, session: Session) -> nn.Module:
    """Return ``build()``, filled at a run's fresh start with the weights that ``config`` names.

    ``init_from`` names the source, ``init_from_average`` which of its weights. A run with a checkpoint ignores both,
    because its own weights follow. Every rank calls it and gets the same weights. Tensors match by name, wrappers'
    prefixes aside, and shape. The log says which did not match; these keep the values that ``build`` gave them. A model
    made without memory (on ``meta``) is not filled: sharding strategies hand rank 0's weights to all. Raises
    ConfigError when nothing matches or there is no such source, and CheckpointError when it cannot be read.
    Parameters that match ``config.freeze`` are frozen.
    """
    model = build()
    freeze(model, config.freeze)
    if torch.empty(()).device.type == "meta":
        return model
    if config.init_from is None:
        return model
    session.activity.phase = hang.LOADING
    which = None if config.init_from_average is None else whole.AVERAGE if config.init_from_average else whole.RAW
    source = read_on_all_ranks(config.init_from, which, session)
    if source is not None:
        match = fill(model, source.tensors)
        if not match.filled:
            raise ConfigError(f"model.init_from: nothing in {source.path} fits this model{match.misfits(every=True)}")
        if session.is_main:
            which = _WHICH[source.which]
            log.info("initial weights%s from %s: %d tensors%s", which, source.path, len(match.filled), match.misfits())
    return model


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters whose name matches one of ``patterns``.

    A module all of whose own parameters are frozen stays in evaluation mode, so that a BatchNorm keeps the statistics
    that its weights were trained with. Raises ConfigError for a pattern without a match, or when nothing is left.
    """
    if not patterns:
        return
    # A tied parameter is found under each of its names.
    named = dict(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in named):
            layers = [name.rpartition(".")[0] + ".*" for name in named]
            raise ConfigError(
                f"model.freeze: {pattern!r} matches no parameter of this model; "
                f"{did_you_mean(pattern, [*named, *layers])}"
                f"there are: {listing([*named], 12)}"
            )
    for name, parameter in named.items():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in named.values()):
        raise ConfigError(f"model.freeze: {listing([*patterns])} leaves no parameter to train")
    for module in model.modules():
        own = [*module.parameters(recurse=False)]
        if own and not any(parameter.requires_grad for parameter in own):
            module.eval()


_WHICH = {whole.AVERAGE: " (the moving average)", whole.RAW: " (raw)", None: ""}


@dataclass(frozen=True)
class Match:
    """The outcome of matching a model and a file by names and shapes."""

    filled: list[str]
    missing: list[str]
    extra: list[str]
    misshapen: list[str]

    def misfits(self, *, every: bool = False) -> str:
        """Return what did not match, as the end of a sentence. It lists a few names of each sort, or ``every`` one."""
        sorts = {
            "not in the file, and left as made": self.missing,
            "of another shape, and left as made": self.misshapen,
            "only in the file": self.extra,
        }
        most = 10**9 if every else 10
        return "".join(f"; {sort} ({len(names)}): {listing(names, most)}" for sort, names in sorts.items() if names)


@torch.no_grad()
def fill(model: nn.Module, tensors: Mapping[str, Tensor]) -> Match:
    """Copy into ``model``, in place and in its types, what fits in name and shape."""
    # Tensors only: extra state, which may be any object, is not copied.
    own = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    names = pair(own, tensors)
    paired = set(names.values())
    match = Match([], [], [name for name in tensors if name not in paired], [])
    for name, value in own.items():
        if name not in names:
            match.missing.append(name)
            continue
        tensor = tensors[names[name]]
        if value.shape == tensor.shape:
            value.copy_(tensor)
            match.filled.append(name)
        else:
            match.misshapen.append(f"{name} {tuple(value.shape)}, in the file {tuple(tensor.shape)}")
    # A tied weight has several names in the model, but perhaps only one in the file.
    filled = {own[name].data_ptr() for name in match.filled}
    match.missing[:] = [name for name in match.missing if own[name].data_ptr() not in filled]
    return match


def pair(own: Iterable[str], others: Iterable[str]) -> dict[str, str]:
    """Return the name among ``others`` that fits each of ``own``. It is the same one, wrappers' parts aside."""
    free = dict.fromkeys(others)
    pairs = {name: name for name in own if name in free}
    for name in pairs:
        del free[name]
    by_bare_name = {_bare(name): name for name in free}
    rest = [name for name in own if name not in pairs]
    return pairs | {name: by_bare_name[_bare(name)] for name in rest if _bare(name) in by_bare_name}


def _bare(name: str) -> str:
    for infix in _INFIXES:
        name = name.replace(infix, "")
    while name.startswith(_PREFIXES):
        name = name.partition(".")[2]
    return name


class Weights(NamedTuple):
    """A model's tensors by name, their path, and which weights they are.

    ``which`` is ``whole.AVERAGE``, ``RAW``, or None if unknown.
    """

    path: Path
    tensors: dict[str, Tensor]
    which: str | None


def read_on_all_ranks(source: str, which: str | None, session: Session) -> Weights | None:
    """Read the weights, on all ranks from the file that rank 0 has chosen: others might find a newer checkpoint.

    None if the run has a checkpoint, as rank 0 sees it: over a file server another rank may see it later.
    """
    read: list[Weights] = []  #: on rank 0, which alone calls ``look``

    def look() -> dict[str, str]:
        if committed(session.run_dir / "checkpoints"):
            return {}
        chosen = origin.find(source)
        try:
            read.append(read_weights(chosen, which))
        except RequestError as error:
            raise ConfigError(f"model.init_from_average: true: {source}: {error}") from None
        kind = origin.CHECKPOINT if chosen.kind == origin.RUN else chosen.kind
        return {"kind": kind, "path": str(read[0].path)}

    choice = session.from_main("model.init_from", look)
    if not choice:
        return None
    path = Path(choice["path"])
    # The path comes from the ranks' store: accept only one that the config names.
    if Path(source).is_absolute() and Path(source) not in (path, path.parent.parent):
        raise ConfigError(f"model.init_from: rank 0 cannot have read {path}, which is not in {source}")
    return read[0] if session.is_main else read_weights(WeightsOrigin(choice["kind"], path), which)


def read_weights(source: WeightsOrigin, which: str | None = None) -> Weights:
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
    names = sorted(set(json.loads(fsio.read_bytes(index))["weight_map"].values()))
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

    with fsio.open_file(path / ".metadata") as file:
        metadata: Metadata = _MetadataUnpickler(file).load()
    # Only the tensors are read: the rest of the folder is pickled.
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
