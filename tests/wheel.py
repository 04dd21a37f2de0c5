"""The wheel, built from this checkout and installed where there is no checkout."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

from tests.pages import ROOT


class Installed(NamedTuple):
    """An environment that holds the wheel, and this one's dependencies."""

    wheel: Path
    toolkit: Path
    environ: dict[str, str]


def install_wheel(folder: Path) -> Installed:
    """Build the wheel and install it in a new environment in ``folder``, without a network.

    The packages of the running environment are on the path, but the checkout is not. The running environment has the
    checkout by a .pth file, and Python reads those only in the environment's own folder.
    """
    wheel = build("wheel", ROOT, folder / "dist")
    made(sys.executable, "-m", "venv", "--without-pip", str(folder / "venv"))
    python = str(folder / "venv/bin/python")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    made(*pip, "--python", python, "install", "--no-index", "--no-deps", str(wheel))
    (own,) = (folder / "venv/lib").glob("python*/site-packages")
    (own / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TOOLKIT", "PYTHON", "SLURM"))}
    environ = {**kept, "TOOLKIT_RUNS": str(folder / "runs"), "OMP_NUM_THREADS": "1"}
    return Installed(wheel, folder / "venv/bin/toolkit", environ)


def build(kind: str, project: Path, folder: Path) -> Path:
    """Build the ``wheel`` or ``sdist`` of a project in ``folder``, and return it."""
    made(sys.executable, "-m", "hatchling", "build", "--target", kind, "--directory", str(folder), cwd=project)
    (built,) = folder.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return built


def made(*argv: str, cwd: Path | None = None) -> None:
    done = subprocess.run(argv, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
