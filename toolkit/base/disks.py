"""Disks: whether all nodes share one, which are a node's own, and where torch keeps there what it compiles.

On NFS ranks of many nodes would rename and delete each other's compiled files, and one dies of "Stale file handle".
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from toolkit.base import fsio, torch_version, trust
from toolkit.base.errors import RequestError

#: Types of file systems that many nodes read from, as /proc/mounts names them.
SHARED = {
    *("nfs", "nfs4", "lustre", "gpfs", "beegfs", "beegfs_nodev", "ceph", "panfs", "pvfs2", "orangefs", "wekafs"),
    *("cifs", "smb3", "afs", "9p", "virtiofs", "glusterfs", "daos", "quobyte", "vast"),
}


def file_system(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """Return the type of the file system of ``path``. Empty if it is unknown."""
    real, found = path.resolve(), (0, "")
    for line in mounts.read_text(errors="replace").splitlines():
        _, folder, kind, *_ = line.split(" ")
        folder = folder.replace("\\040", " ")
        # Of equal folders the last mount is the one that is seen.
        if real.is_relative_to(folder) and len(folder) >= found[0]:
            found = (len(folder), kind)
    return found[1]


def is_shared(path: Path) -> bool:
    """True if other nodes read from the same file system."""
    return file_system(path).removeprefix("fuse.") in SHARED


def own_folders(stage_dir: str | None, environ: Mapping[str, str]) -> list[Path]:
    """Return the folders of this node that may hold copies, the best first. Memory comes last."""
    if stage_dir is not None:
        return [fsio.expand(stage_dir)]
    named = [environ.get("SLURM_TMPDIR"), environ.get("TMPDIR"), "/tmp", "/dev/shm"]
    folders = dict.fromkeys(Path(name) for name in named if name)
    return [folder for folder in folders if folder.is_dir() and not is_shared(folder)]


def cache_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that move caches to a folder of this node, one for each user and version of torch.

    Left out are those that the user has set, and those of caches that are on a disk of the node already. The folder
    outlives the job, so that its next start finds what was compiled.
    """
    triton_home = environ.get("TRITON_HOME") or environ.get("HOME") or "~"
    # Not gettempdir(): it would remember its answer, and a script that sets TMPDIR later would not be heard.
    scratch = next((environ[name] for name in ("TMPDIR", "TEMP", "TMP") if environ.get(name)), "/tmp")
    places = {
        "TRITON_CACHE_DIR": fsio.expand(triton_home),
        "TORCHINDUCTOR_CACHE_DIR": Path(scratch),
    }
    moved = [name for name, place in places.items() if name not in environ and is_shared(place)]
    folder = _folder(environ) if moved else None
    if folder is None:
        return {}
    return {name: str(folder / name.partition("_")[0].lower()) for name in moved}


def _folder(environ: Mapping[str, str]) -> Path | None:
    """Return a folder on a disk of this node that no one else may write; None where there is none."""
    version = torch_version.installed() or "none"
    # /tmp comes first: Slurm removes its own folder with the job.
    for disk in sorted(own_folders(None, environ), key=lambda disk: disk != Path("/tmp")):
        folder = disk / f"toolkit-caches-{os.getuid()}" / f"torch-{version}"
        try:
            trust.refuse_of_others(fsio.make_dir(folder, parents=1), "the folder of compiled kernels")
        except (OSError, RequestError):
            continue
        return folder
    return None
