"""Any torchrun-style script as the ranks, unmodified: ``python -m toolkit.launch.foreign CONFIG`` becomes the command.

The command lies beside the run's config. It finds what torchrun would have set (RANK, WORLD_SIZE, MASTER_ADDR, a store
that an agent hosts, an error file), and nothing else of ours: no snapshot on its path, no handlers, no wrapper process.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from toolkit import fsio, records
from toolkit.cluster import placement
from toolkit.cluster.rank_environment import environment
from toolkit.errors import RequestError
from toolkit.launch import node_watch
from toolkit.records import TEXT, ListOf
from toolkit.rundir import RunDir


def write_command(run: RunDir, command: Sequence[str]) -> None:
    """Note what the ranks are to become."""
    fsio.write_json(run.path / "command.json", list(command))


def read_command(run: RunDir) -> list[str]:
    """What the ranks are to become. Raises RequestError where nothing is noted, or it is damaged."""
    command: list[str] | None = records.read(run.path / "command.json", ListOf(TEXT))
    if not command:
        raise RequestError(f"{run.path / 'command.json'} is missing: this run was not made by `toolkit exec`")
    return command


def main(run: RunDir) -> None:
    """Become the command, as one rank of ``run``. Ends the process, with one line, if that cannot be started."""
    place = placement.derive(os.environ, socket.gethostname())
    cpus = placement.whole_number(os.environ, "OMP_NUM_THREADS", 1)
    environ = {**os.environ, **environment(place, os.environ, cpus)}
    attempt = placement.whole_number(environ, "TOOLKIT_ATTEMPT", 1)
    environ["TORCHELASTIC_ERROR_FILE"] = str(run.error_file(attempt, place.rank))
    environ["TORCHELASTIC_RUN_ID"] = run.id
    environ["TOOLKIT_CONFIG"] = json.dumps([str(run.config)])  # for toolkit.start(), see rank.py
    environ[node_watch.MARK_VARIABLE] = node_watch.mark(run, attempt, place.rank)
    environ.setdefault("PYTHONFAULTHANDLER", "1")  # a rank that is ended as hung writes its stack, see outside_stacks
    command = read_command(run)
    try:
        os.execvpe(command[0], command, without_snapshot(environ, run.code))
    except OSError as error:
        sys.exit(f"toolkit exec: {command[0]}: cannot be started on {place.host}: {error.strerror}")


def without_snapshot(environ: dict[str, str], code: Path) -> dict[str, str]:
    """The user's own import path back: the script's folder first, the copy of the sources gone."""
    cleaned = {name: value for name, value in environ.items() if name != "PYTHONSAFEPATH"}
    paths = [path for path in cleaned.pop("PYTHONPATH", "").split(os.pathsep) if path and path != str(code)]
    return {**cleaned, **({"PYTHONPATH": os.pathsep.join(paths)} if paths else {})}


if __name__ == "__main__":
    main(RunDir(Path(sys.argv[1]).parent))
