"""Imports from a shared disk, and from the nodes' copies of an environment.

The calls to the shared disk are those of a real process, which imports from a real environment and from a real copy of
it. The work of unpacking is real. The file server is simulated: it answers one call after the other, and each call also
takes its time on the way.
"""

import heapq
import json
import os
import subprocess
import sysconfig
import tempfile
import time
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from shutil import copytree

from tests.scale import Curve
from toolkit.plugins.staging import archive, copying
from toolkit.plugins.staging.archive import Archive, ArchiveSource, PackRequest

#: Of the file server: calls and bytes a second; and the seconds that a call takes without others.
CALLS_A_SECOND, BYTES_A_SECOND, CALL_S = 30_000, 2e9, 0.0005
READ_BYTES = 1 << 20
PACKAGES = ("numpy", "numpy.libs", "yaml", "omegaconf")
#: Prints each path that the import system asks for, and each file that is opened.
PROGRAM = """
import _frozen_importlib_external as machinery, json, sys, time
paths, stat = [], machinery._path_stat
machinery._path_stat = lambda path: paths.append(path) or stat(path)
sys.addaudithook(lambda event, args: paths.append(str(args[0])) if event in ("open", "os.listdir") else None)
import numpy, numpy.random, numpy.fft, yaml
print(json.dumps([paths, time.process_time()]))
"""


@dataclass(frozen=True)
class Import:
    """One process's import: the bytes of each call to the shared disk, and CPU seconds."""

    calls: Sequence[int]
    cpu_s: float


@cache
def real_imports() -> tuple[Import, Import, Archive, float]:
    """Import from an environment and from its copy. Return both, the package, and the CPU seconds for a copy."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prefix, node = folder / "shared/venv", folder / "node"
        venv.create(prefix, symlinks=True, with_pip=False)
        site = next(prefix.glob("lib/*/site-packages"))
        for each in PACKAGES:
            installed = Path(sysconfig.get_path("purelib")) / each
            if installed.is_dir():
                copytree(installed, site / each)
        node.mkdir()
        made = archive.pack(ArchiveSource(str(prefix), "bin/python"), PackRequest(str(folder / "shared/cache"), ()))
        began = time.thread_time()
        copy = copying.copy(made, [node])
        unpack_s = time.thread_time() - began
        os.close(copy.lock)  # it keeps a copy from being evicted while a run uses it; nothing evicts here
        imports = [_import(python / "bin/python", folder / "shared") for python in (prefix, copy.path)]
    return imports[0], imports[1], made, unpack_s


def _import(python: Path, shared: Path) -> Import:
    command = [str(python), "-c", PROGRAM]
    subprocess.run(command, check=True, capture_output=True, env={})  # the files are in memory from here on
    told = subprocess.run(command, check=True, capture_output=True, text=True, env={}).stdout
    paths, cpu_s = json.loads(told)
    asked = [Path(path) for path in paths if Path(path).is_relative_to(shared)]
    return Import([path.stat().st_size if path.is_file() else 0 for path in asked], cpu_s)


def served(nodes: int, calls: Sequence[int]) -> float:
    """Return the seconds until all of ``nodes`` have all answers. Each makes one call after the other."""
    free_at = last = 0.0
    waiting = [(0.0, node, 0) for node in range(nodes)]
    while waiting:
        asked_at, node, call = heapq.heappop(waiting)
        if call == len(calls):
            last = max(last, asked_at)
            continue
        free_at = max(free_at, asked_at) + 1 / CALLS_A_SECOND + calls[call] / BYTES_A_SECOND
        heapq.heappush(waiting, (free_at + CALL_S, node, call + 1))
    return last


def start(nodes: int) -> Mapping[str, float]:
    shared, own, made, unpack_s = real_imports()
    import_s = served(nodes, own.calls) + own.cpu_s

    def copied_s(nodes: int) -> float:
        """Return the seconds until all nodes have read the package, which they unpack meanwhile."""
        return max(served(nodes, [READ_BYTES] * (made.size_bytes // READ_BYTES + 1)), unpack_s)

    return {
        "calls a node": len(shared.calls),
        "import s": round(served(nodes, shared.calls) + shared.cpu_s, 2),
        "calls with a copy": len(own.calls),
        "import s with a copy": round(import_s, 2),
        "copied and imported s": round(copied_s(nodes) + import_s, 2),
        "of one node's": round((copied_s(nodes) + import_s) / (copied_s(1) + served(1, own.calls) + own.cpu_s), 2),
    }


CURVES = [Curve("imports from a shared disk", "nodes", (1, 8, 64, 256), start)]
