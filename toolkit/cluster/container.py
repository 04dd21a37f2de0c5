"""Containers: the commands that run inside an image by Apptainer, or by Pyxis and Enroot; the supervisor stays outside.

Apptainer (https://apptainer.org/docs/user/main/cli/apptainer_exec.html) is a program that becomes the command: file
descriptors, signals and exit codes are the command's own. Pyxis (https://github.com/NVIDIA/pyxis/wiki/Usage) is a part
of srun, so what is to run inside is an srun step.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit import fsio
from toolkit.errors import ConfigError

APPTAINER, PYXIS = "apptainer", "pyxis"


@dataclass(frozen=True)
class Image:
    """What ``cluster.container`` names, and the runtime that it is for."""

    runtime: str
    name: str  #: a file, a folder, or ``[REGISTRY#]IMAGE[:TAG]`` for Pyxis


def parse(text: str) -> Image:
    """The image that ``cluster.container`` stands for. Raises ConfigError where it does not say for which runtime."""
    runtime, colon, name = text.partition(":")
    if colon and runtime in (APPTAINER, PYXIS):
        image = Image(runtime, name)
    elif text.endswith((".sif", "/")):
        image = Image(APPTAINER, text)
    elif text.endswith(".sqsh") or "#" in text:
        image = Image(PYXIS, text)
    else:
        raise ConfigError(
            f"cluster.container: {text!r} may be for Apptainer or for Pyxis; say which: apptainer:{text} or "
            f"pyxis:{text}"
        )
    if _is_a_file(image) and not image.name.startswith("/"):
        raise ConfigError(f"cluster.container: {text!r} is relative, and ranks run elsewhere: give an absolute path")
    return image


def refuse_missing(text: str) -> None:
    """Where jobs are submitted: raises ConfigError for an image file that is not there."""
    image = parse(text)
    if _is_a_file(image) and not Path(image.name).exists():
        raise ConfigError(f"cluster.container: there is no {image.name}; build it, or `apptainer pull` it, first")


def _is_a_file(image: Image) -> bool:
    return image.name.endswith((".sif", ".sqsh", "/")) or image.name.startswith("/")


@dataclass(frozen=True)
class Container:
    """Starts commands inside ``image``, where ``folders`` are found under the paths that they have outside."""

    image: Image
    folders: tuple[str, ...]
    workdir: str
    code: str  #: of the run: first on Python's path
    gpus: bool

    @property
    def is_a_step(self) -> bool:
        """Whether only srun can start something inside."""
        return self.image.runtime == PYXIS

    def command(self, module: Sequence[str]) -> list[str]:
        """``python -m module`` inside. The image's own Python; of the host's only the run's code is on its path, and
        packages below the user's home, made for another Python, are left out."""
        inside = ["env", f"PYTHONPATH={self.code}", "PYTHONNOUSERSITE=1", "python3", "-P", "-m", *module]
        return inside if self.is_a_step else [*self._apptainer(), *inside]

    def srun_options(self) -> list[str]:
        """What the srun of a step adds for it."""
        if not self.is_a_step:
            return []
        mounts = ",".join(f"{folder}:{folder}" for folder in self.folders)
        return [
            f"--container-image={self.image.name}",
            f"--container-mounts={mounts}",
            f"--container-workdir={self.workdir}",
        ]

    def _apptainer(self) -> list[str]:
        program = next(filter(shutil.which, ("apptainer", "singularity")), "apptainer")
        binds = [f"--bind={folder}" for folder in self.folders]
        return [program, "exec", *binds, f"--pwd={self.workdir}", *(["--nv"] if self.gpus else []), self.image.name]


def outermost(folders: Iterable[str | Path]) -> tuple[str, ...]:
    """Those of ``folders`` that are there and lie in no other one, as absolute paths, symbolic links and all: ranks use
    them as they are given. Raises ConfigError for one that no mount can name."""
    found: list[Path] = []
    for folder in sorted({fsio.expand(folder).absolute() for folder in folders}, key=lambda path: path.parts):
        if set(":,") & set(str(folder)):
            raise ConfigError(f"cluster.container: {folder} cannot be mounted: no : or , may be in its path")
        if folder.is_dir() and not any(other in folder.parents for other in found):
            found.append(folder)
    return tuple(map(str, found))
