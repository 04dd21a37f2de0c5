"""The copy of a project's sources, in calls by path to the file system."""

import io
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.scale import Curve
from toolkit.run.prepare import snapshot

#: Calls that take a path or change a file. ``fstat`` of an open file is answered without the server.
CALLS = [(os, name) for name in ("stat", "lstat", "open", "chmod", "fchmod", "access", "readlink", "mkdir", "rename")]
CALLS += [(io, "open")]


def counted(project: Path, code: Path, files: int) -> Counter[str]:
    """Count the calls of a copy of ``project``, by name. It has ``files`` more files, 50 to a folder."""
    for number in range(files):
        path = project / f"package{number // 50}/module{number}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    count: Counter[str] = Counter()

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            # An int is a descriptor: such a call goes to the server only if it changes the file.
            count[name] += not isinstance(args[0], int) or name == "os.fchmod"
            return function(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for module, name in CALLS:
            patch.setattr(module, name, counting(f"{module.__name__}.{name}", getattr(module, name)))
        snapshot.take(project, code)
    count["files"] = sum(path.is_file() for path in code.rglob("*"))
    return count


def copy(files: int) -> Mapping[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "project").mkdir()
        count = counted(Path(folder) / "project", Path(folder) / "run/code", files)
    return {"calls": sum(count.values()) - count["files"]}


CURVES = [Curve("copy of the sources", "files", (100, 1000, 10_000), copy)]
