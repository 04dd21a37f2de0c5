"""Programs that look at a node: those of the toolkit, which start without site-packages, and nvidia-smi."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

Ask = Callable[[Sequence[str]], str | None]


def ask_smi(arguments: Sequence[str]) -> str | None:
    """Return what nvidia-smi prints; None if there is no nvidia-smi.

    Raises OSError or subprocess.SubprocessError.
    """
    program = shutil.which("nvidia-smi") or shutil.which("nvidia-smi", path="/usr/bin:/usr/local/nvidia/bin")
    if program is None:
        return None
    command = [program, *arguments, "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        words = (done.stdout + done.stderr).strip().splitlines()[-1:] or ["no word"]
        raise subprocess.SubprocessError(f"nvidia-smi failed with exit code {done.returncode}: {words[0]}")
    return done.stdout


def bare_python(module: str, *arguments: str) -> list[str]:
    """Return the command that calls ``main()`` of ``module``, which needs only Python's own library.

    ``-S``: searching site-packages takes longer than all checks of a node together.
    """
    here = str(Path(__file__).parents[2])
    code = f"import sys; sys.path.insert(0, {here!r}); from {module} import main; main()"
    return [sys.executable, "-I", "-S", "-c", code, *arguments]
