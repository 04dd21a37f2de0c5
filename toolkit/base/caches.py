"""Where torch and Triton keep what they have compiled: on the node, not in a home that all nodes share.

On NFS ranks of many nodes rename and delete each other's files, and one dies of "Stale file handle".
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from toolkit.base import fsio, trust
from toolkit.base.disks import is_shared, own_folders
from toolkit.base.errors import RequestError


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that move caches to a folder of this node, one for each user and version of torch.

    Left out are those that the user has set, and those of caches that are on a disk of the node already. The folder
    outlives the job, so that its next start finds what was compiled.
    """
    triton_home = environ.get("TRITON_HOME") or environ.get("HOME") or "~"
    # Not gettempdir(): it would remember its answer, and a script that sets TMPDIR later would not be heard.
    scratch = next((environ[name] for name in ("TMPDIR", "TEMP", "TMP") if environ.get(name)), "/tmp")
    places = {
        "TRITON_CACHE_DIR": Path(triton_home).expanduser(),
        "TORCHINDUCTOR_CACHE_DIR": Path(scratch),
    }
    moved = [name for name, place in places.items() if name not in environ and is_shared(place)]
    folder = _folder(environ) if moved else None
    if folder is None:
        return {}
    return {name: str(folder / name.partition("_")[0].lower()) for name in moved}


def _folder(environ: Mapping[str, str]) -> Path | None:
    """Return a folder on a disk of this node that no one else may write; None where there is none."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        version = "none"
    # /tmp comes first: Slurm removes its own folder with the job.
    for disk in sorted(own_folders(None, environ), key=lambda disk: disk != Path("/tmp")):
        folder = disk / f"toolkit-caches-{os.getuid()}" / f"torch-{version}"
        try:
            trust.refuse_of_others(fsio.make_dir(folder, parents=1), "the folder of compiled kernels")
        except (OSError, RequestError):
            continue
        return folder
    return None
