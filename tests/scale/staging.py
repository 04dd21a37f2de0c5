"""Imports from a shared disk and from the nodes' copies of an environment: a file server that is played, real calls.

What a process asks of the shared disk is counted in a real one, which imports from a real environment, and from a real
copy of it. The file server is played: it answers one call after the other, and each call has a way to go.
"""

from __future__ import annotations

import heapq
import json
import os
import subprocess
import sysconfig
import tempfile
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from shutil import copytree

from tests.scale import Curve
from toolkit.staging import copying, package
from toolkit.staging.package import Package, PackageSource, PackRequest

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
    """What one process does: the bytes of each call to the shared disk, and CPU seconds of its own."""

    calls: Sequence[int]
    cpu_s: float


@cache
def real_imports() -> tuple[Import, Import, Package]:
    """Import from an environment and from its copy; return both, and the package."""
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
        made = package.pack(PackageSource(str(prefix), "bin/python"), PackRequest(str(folder / "shared/cache"), ()))
        copy = copying.copy(made, [node])
        for lock in copy.locks:
            os.close(lock)
        imports = [_import(python / "bin/python", folder / "shared") for python in (prefix, copy.path)]
    return imports[0], imports[1], made


def _import(python: Path, shared: Path) -> Import:
    command = [str(python), "-c", PROGRAM]
    subprocess.run(command, check=True, capture_output=True, env={})  # the files are in memory from here on
    told = subprocess.run(command, check=True, capture_output=True, text=True, env={}).stdout
    paths, cpu_s = json.loads(told)
    asked = [Path(path) for path in paths if Path(path).is_relative_to(shared)]
    return Import([path.stat().st_size if path.is_file() else 0 for path in asked], cpu_s)


def served(nodes: int, calls: Sequence[int]) -> float:
    """Return after how many seconds the last of ``nodes`` has all answers; each asks one call after the other."""
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


def start(nodes: int) -> Mapping[str, object]:
    shared, own, made = real_imports()
    reads = [READ_BYTES] * (made.size_bytes // READ_BYTES + 1)
    return {
        "calls a node": len(shared.calls),
        "import s": f"{served(nodes, shared.calls) + shared.cpu_s:.2f}",
        "calls with a copy": len(own.calls),
        "import s with a copy": f"{served(nodes, own.calls) + own.cpu_s:.2f}",
        "copy read s": f"{served(nodes, reads):.2f}",
    }


CURVES = [Curve("imports from a shared disk", "nodes", (1, 8, 64, 256), start)]
