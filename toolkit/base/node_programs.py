"""Programs that look at a node: they start without site-packages."""

from __future__ import annotations

import sys
from pathlib import Path


def bare_python(module: str, *arguments: str) -> list[str]:
    """Return the command that calls ``main()`` of ``module``, which needs only Python's own library.

    ``-S``: searching site-packages takes longer than all checks of a node together.
    """
    here = str(Path(__file__).parents[2])
    code = f"import sys; sys.path.insert(0, {here!r}); from {module} import main; main()"
    return [sys.executable, "-I", "-S", "-c", code, *arguments]
