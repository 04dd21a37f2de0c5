"""Runs any torchrun-style script as the ranks, unmodified: ``python -m toolkit.nodes.start.user_script CONFIG``.

It becomes the command of the run's config, which finds what torchrun would have set and nothing else of the toolkit's:
no snapshot on its path, no handlers, no wrapper process. A Python program runs in this very process if that is a fork
that has imported torch; any other program replaces it.
"""

from __future__ import annotations

import glob
import json
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from toolkit import config as configs
from toolkit.base import fsio, secret_values, this_node
from toolkit.base.errors import RequestError, ToolkitError
from toolkit.config import script_arguments
from toolkit.files import error_file, rundir
from toolkit.files.rundir import RunDir
from toolkit.nodes.agent import zygote
from toolkit.nodes.start import python_command
from toolkit.slurm import placement
from toolkit.slurm.environment import whole_number
from toolkit.slurm.placement import environment


def read_command(run: RunDir) -> list[str]:
    """Return the command that the ranks become. Raises RequestError where none is recorded."""
    config = configs.load_config(run.config, site=False)
    if not config.argv:
        raise RequestError(f"{run.config}: argv: is missing: this run was not made by `toolkit exec`")
    return script_arguments.with_options(config.argv, config.args)


def restart_words(words: Sequence[str]) -> list[str]:
    """Return the words for a restart; none if no file matches. ``{newest:ckpt/*.pt}`` is the newest that does."""
    newest = {}
    for pattern in script_arguments.NEWEST.findall(" ".join(words)):
        paths = glob.glob(pattern, recursive=True)  # noqa: PTH207  # Path.glob takes no absolute pattern
        if not paths:
            print(f"toolkit exec: no file matches {pattern}: restarted without --restart-args", file=sys.stderr)
            return []
        newest[pattern] = max(paths, key=_changed)
    return [script_arguments.NEWEST.sub(lambda match: newest[match[1]], word) for word in words]


def _changed(path: str) -> tuple[float, str]:
    try:
        return Path(path).stat().st_mtime, path
    except OSError:  # removed since
        return 0.0, path


def main(run: RunDir) -> None:
    """Become the command, as one rank of ``run``. End the process, with one line, if the command cannot be started."""
    place = placement.derive(os.environ, socket.gethostname())
    cpus = whole_number(os.environ, "OMP_NUM_THREADS", 1)
    try:
        config, command = configs.load_config(run.config, site=False), read_command(run)
        secret_values.give_to_rank(config.secrets)
    except ToolkitError as error:
        error_file.write(error, place.rank)
        sys.exit(f"toolkit exec: {error}")
    environ = {**os.environ, **environment(place, os.environ, cpus), **this_node.cache_variables(os.environ)}
    attempt = whole_number(environ, "TOOLKIT_ATTEMPT", 1)
    # What torchrun would set besides the rank's numbers.
    environ["TORCHELASTIC_ERROR_FILE"] = str(run.error_file(attempt, place.rank))
    environ["TORCHELASTIC_RUN_ID"] = run.id
    environ["TOOLKIT_CONFIG"] = json.dumps([str(run.config)])  # for toolkit.start(), see `toolkit.run.rank.main`
    environ[rundir.RANK_VARIABLE] = run.rank_tag(attempt, place.rank)
    environ.setdefault("PYTHONFAULTHANDLER", "1")  # a rank that is ended as hung writes its stack, see outside_stacks
    fsio.restore_umask()
    environ = restore_import_path(environ, run.code)
    if attempt > 1:
        command += restart_words(config.restart_args)
    # In a fork that has imported torch, run the program here; else replace this process.
    python = python_command.parse(command, environ.get("PATH")) if "torch" in sys.modules else None
    if python is not None:
        why = python_command.why_not_in_process(python, environ)
        if why is None:
            zygote.set_process_title(command, {k: v for k, v in environ.items() if os.environ.get(k) != v})
            python_command.run_in_process(python, command, environ)
            return
        print(f"toolkit exec: starting a fresh interpreter: {why}", file=sys.stderr)
    try:
        os.execvpe(command[0], command, environ)
    except OSError as error:
        # A mistyped name. What an earlier attempt has started is missing on this node alone, and is tried elsewhere.
        kind = RequestError if attempt == 1 else ToolkitError
        failure = kind(f"{command[0]}: cannot be started on {place.host}: {error.strerror}")
        error_file.write(failure, place.rank)
        sys.exit(f"toolkit exec: {failure}")


def restore_import_path(environ: dict[str, str], code: Path) -> dict[str, str]:
    """Return the variables with the user's own import path. The script's folder is first, our copy gone."""
    cleaned = {name: value for name, value in environ.items() if name != "PYTHONSAFEPATH"}
    paths = [path for path in cleaned.pop("PYTHONPATH", "").split(os.pathsep) if path and path != str(code)]
    return {**cleaned, **({"PYTHONPATH": os.pathsep.join(paths)} if paths else {})}


if __name__ == "__main__":
    main(RunDir(Path(sys.argv[1]).parent))
