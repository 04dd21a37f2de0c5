"""What `model.init_from` may name, and where it is. It is looked up on the login node, so without torch."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from toolkit.base import fsio
from toolkit.base.errors import ConfigError, RunNotFoundError
from toolkit.files import rundir

#: The kinds of origins.
RUN, CHECKPOINT, SAFETENSORS, TORCH, DCP = "run", "checkpoint", "safetensors", "torch", "dcp"
#: A folder with one safetensors file, or with several and an index of them, as Hugging Face writes it.
HUGGING_FACE = "safetensors folder"
WHOLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
_SUFFIXES = {".safetensors": SAFETENSORS, ".pt": TORCH, ".pth": TORCH}
#: The files by one of which a folder of each kind is known.
_SIGNS = {
    CHECKPOINT: ("manifest.json",),
    DCP: (".metadata",),
    HUGGING_FACE: (INDEX_FILE, WHOLE_FILE),
    RUN: ("config.yaml",),
}


@dataclass(frozen=True)
class WeightsOrigin:
    """Where weights come from."""

    kind: str
    path: Path


def find(text: str, *, may_come: bool = False) -> WeightsOrigin:
    """Return what ``text`` names. With ``may_come`` a run need not have a checkpoint yet.

    That is a file, a checkpoint's folder, a DCP folder, a folder of safetensors files, or a run by its folder, id or
    name. A name means the newest run of that name that has a checkpoint: the newest of all may be the run that asks.
    ResNet50_Weights.IMAGENET1K_V2 and the like mean torchvision's weights. Raises ConfigError that says what there is.
    """
    if is_published(text):
        weights = published_path(text)
        if not weights.is_file():
            raise ConfigError(
                f"model.init_from: the weights {text} are not there yet: there is no {weights}. Compute nodes have no "
                "internet: on the login node run\n"
                f"    toolkit data fetch {text} --root {shlex.quote(str(weights.parents[1]))}"
            )
        return WeightsOrigin(TORCH, weights)
    # A file or folder of this name counts before a run.
    path = fsio.expand(text).absolute()
    if path.is_file():
        if path.suffix not in _SUFFIXES:
            raise ConfigError(f"model.init_from: {path} is none of {', '.join(_SUFFIXES)}; weights are read from these")
        return WeightsOrigin(_SUFFIXES[path.suffix], path)
    for kind, signs in _SIGNS.items():
        if any((path / sign).is_file() for sign in signs):
            return WeightsOrigin(kind, path)
    return _run(text, may_come)


def is_published(name: str) -> bool:
    """True for the name of weights that torchvision has published: ResNet50_Weights.IMAGENET1K_V2."""
    return re.fullmatch(r"\w+_Weights\.\w+", name) is not None


def published_path(name: str, root: str | None = None) -> Path:
    """Return where the weights ``name`` are below ``root``, by default `$TOOLKIT_DATA` or ./data."""
    return fsio.expand(root or os.environ.get("TOOLKIT_DATA") or "data").absolute() / "weights" / f"{name}.pth"


def _run(text: str, may_come: bool) -> WeightsOrigin:
    try:
        run = rundir.find(text)
    except RunNotFoundError as error:
        raise ConfigError(
            f"model.init_from: {text} is not a file, a checkpoint's folder (step-...), a DCP folder, a folder with "
            f"{WHOLE_FILE} or a run: {error}"
        ) from None
    # The run that was found may have no checkpoint yet: then an older one of that name will do.
    named = [other for other in rundir.all_runs() if other.name == text]
    for each in (run, *reversed(named)):
        if any(each.checkpoints.glob("step-*/manifest.json")):
            return WeightsOrigin(RUN, each.path)
    if may_come:
        return WeightsOrigin(RUN, run.path)
    raise ConfigError(
        f"model.init_from: run {run.id} has no checkpoint in {run.checkpoints}; if it works, wait for it with --after"
    )
