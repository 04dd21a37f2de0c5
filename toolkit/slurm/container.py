"""Containers: the commands that run inside an image by Apptainer, or by Pyxis and Enroot. The supervisor stays outside.

Apptainer (https://apptainer.org/docs/user/main/cli/apptainer_exec.html) is a program that becomes the command: file
descriptors, signals and exit codes are the command's own. Pyxis (https://github.com/NVIDIA/pyxis/wiki/Usage) is a part
of srun, so a command can run inside only as an srun step.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit.base import fsio
from toolkit.base.errors import ConfigError

APPTAINER, PYXIS = "apptainer", "pyxis"


@dataclass(frozen=True)
class Image:
    """The image that ``cluster.container`` names, and the runtime that it is for."""

    runtime: str
    name: str  #: a file, a folder, or ``[REGISTRY#]IMAGE[:TAG]`` for Pyxis


def parse(text: str) -> Image:
    """Return the image that ``cluster.container`` stands for. Raises ConfigError if the runtime is not clear."""
    # An explicit runtime comes first; otherwise the form of the name must be one that only one runtime takes.
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
    """Raise ConfigError for an image file that does not exist, where jobs are submitted."""
    image = parse(text)
    if _is_a_file(image) and not Path(image.name).exists():
        raise ConfigError(f"cluster.container: there is no {image.name}; build it, or `apptainer pull` it, first")


def _is_a_file(image: Image) -> bool:
    return image.name.endswith((".sif", ".sqsh", "/")) or image.name.startswith("/")


@dataclass(frozen=True)
class Container:
    """Starts commands inside ``image``, where ``folders`` have the same paths as outside."""

    image: Image
    folders: tuple[str, ...]
    workdir: str
    code: str  #: the run's code: first on Python's path
    gpus: tuple[str, ...] = ()  #: Apptainer's options for them

    @property
    def is_a_step(self) -> bool:
        """True if only srun can start something inside."""
        return self.image.runtime == PYXIS

    def command(self, module: Sequence[str]) -> list[str]:
        """Return the command that runs ``python -m module`` inside, with the image's own Python.

        Of the host only the run's code is on its path. Packages below the user's home were made for another Python.
        """
        inside = ["env", f"PYTHONPATH={self.code}", "PYTHONNOUSERSITE=1", "python3", "-P", "-m", *module]
        if self.is_a_step:
            return inside
        program = next(filter(shutil.which, ("apptainer", "singularity")), "apptainer")
        options = [*(f"--bind={folder}" for folder in self.folders), f"--pwd={self.workdir}"]
        return [program, "exec", *options, *self.gpus, self.image.name, *inside]

    def srun_options(self) -> list[str]:
        """Return the options that the srun of a step needs for the container."""
        if not self.is_a_step:
            return []
        mounts = ",".join(f"{folder}:{folder}" for folder in self.folders)
        return [
            f"--container-image={self.image.name}",
            f"--container-mounts={mounts}",
            f"--container-workdir={self.workdir}",
        ]


def outermost(folders: Iterable[str | Path]) -> tuple[str, ...]:
    """Return those of ``folders`` that exist and lie in no other one, as absolute paths. Symbolic links are kept.

    Raises ConfigError for a path that no mount can name.
    """
    paths = {fsio.expand(folder).absolute() for folder in folders}
    mounted: list[Path] = []
    # A folder comes before those in it.
    for path in sorted(paths, key=lambda path: path.parts):
        if set(":,") & set(str(path)):
            raise ConfigError(f"cluster.container: {path} cannot be mounted: no : or , may be in its path")
        if path.is_dir() and not any(other in path.parents for other in mounted):
            mounted.append(path)
    return tuple(map(str, mounted))
