"""Checks the config of a new run, and makes the run: its folder, a copy of the sources, and its config."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from functools import lru_cache
from pathlib import Path

from toolkit import config as configs
from toolkit.base import fsio, logs, staged, torch_version
from toolkit.base.errors import ConfigError, RequestError
from toolkit.config import JobConfig, is_one_line
from toolkit.config.job_module import missing_imports
from toolkit.config.source import PythonSource, read_source
from toolkit.files import origin, rundir
from toolkit.files.rundir import RunDir
from toolkit.nodes.allocation import Allocation
from toolkit.nodes.start import python_command
from toolkit.run.prepare import snapshot
from toolkit.run.prepare.resume_lint import warn_of_counting
from toolkit.slurm.container import PYXIS
from toolkit.slurm.container import parse as parse_image

log = logs.get(__name__)

#: A submission with less room than this for the run's files warns of it.
LEAST_FREE_BYTES = 16 << 20


def load(config: str | Path | None, overrides: configs.Overrides, project: Path, *, sweep: bool = False) -> JobConfig:
    """Return the config of a run to be submitted, see load_config.

    A script that knows nothing of the toolkit becomes the command of a script's job: it runs as under torchrun.
    """
    loaded = configs.load_config(config, overrides, project=project, sweep=sweep)
    if configs.is_plain(loaded.job, project):
        loaded.argv = [str(staged.origin(sys.executable)), str(project / loaded.job), *loaded.argv]
        loaded.job = configs.SCRIPT_JOB
    return loaded


def absolute_data_root(config: JobConfig) -> JobConfig:
    """Make ``data.root`` mean the same in every folder; return ``config``."""
    if config.data.root is not None:
        config.data.root = str(fsio.expand(config.data.root).absolute())
    return config


def fix_paths(config: JobConfig, project: Path | None) -> None:
    """Make the config's paths independent of the current folder. Ranks may start in another one.

    ``model.init_from`` becomes a path: it may be a name that this run has as well.
    """
    absolute_data_root(config)
    if project is not None and config.job.endswith(".py"):  # ranks use the copy, not the original file
        config.job = snapshot_path(project.resolve(), configs.job_source(config.job, project.resolve())) or config.job
    if config.model.init_from is not None:
        config.model.init_from = str(origin.find(config.model.init_from, may_come=True).path)


def snapshot_path(project: Path, source: Path) -> str | None:
    """Return a file's name in the copy of ``project``; None if it is elsewhere."""
    for path in (source, source.resolve()):
        if path.is_relative_to(project) and ".." not in path.parts:
            return str(path.relative_to(project))
    return None


def new_run(config: JobConfig, project: Path | None, like: RunDir | None = None) -> RunDir:
    """Make a run of ``config`` with a copy of the sources in ``project``, or with those that the run ``like`` has.

    A user script is not copied: it runs where it lies. Raises RequestError where no job could use the folder's path.
    """
    refuse_unfit(rundir.runs_root())
    fix_paths(config, project)
    run = rundir.create(config.name)
    try:
        if project is not None and config.job != configs.SCRIPT_JOB:
            if like is not None:
                shutil.copytree(like.path / rundir.COPIES, run.path / rundir.COPIES, symlinks=True)
            snapshot.take_if_missing(project, run.path)
        else:
            snapshot.note_folder(run)
        fsio.write_atomic(run.config, configs.dump_config(config))
        free_bytes = shutil.disk_usage(run.path).free
        if free_bytes < LEAST_FREE_BYTES:
            log.warning(
                "%s has %s left: without room for logs and checkpoints the run cannot record its progress; make room, "
                "or choose another folder: set TOOLKIT_RUNS",
                *(run.path.parent.parent, fsio.size_text(free_bytes)),
            )
    except BaseException:  # an incomplete run would be listed for ever
        run.remove()
        raise
    return run


def check_submittable(config: JobConfig, executor: str, project: Path, *, is_resume: bool = False) -> None:
    """Raise ConfigError or RequestError unless this executor can run the config from ``project``'s sources."""
    configs.validate(config, project=project, is_resume=is_resume)
    if executor == "slurm":
        from toolkit.plugins.site.reservations import holding_back

        for part in config.cluster.component_requests:
            if text := holding_back(part):
                log.warning("%s", text)
    if executor == "local":
        Allocation.local(config.cluster)  # refuses several nodes
        if config.cluster.container is None:
            torch_version.refuse_missing()
        if config.cluster.container is not None and parse_image(config.cluster.container).runtime == PYXIS:
            raise ConfigError("cluster.container: Pyxis is a part of Slurm, and this is to run without it")
    if config.job == configs.SCRIPT_JOB:  # a user script is not copied: it runs where it lies
        if executor == "debug":
            raise RequestError("executor: a user script cannot be debugged in this process; use local")
        python = python_command.parse(config.argv, os.environ.get("PATH"))
        if python is not None and not python.is_module:
            _warn_of_imports(config, project / python.target, project)
        return
    source = configs.job_source(config.job, project)  # may be a link, which is copied with the package that it leads to
    if snapshot_path(project, source) is None and not {"site-packages", "dist-packages"} & {*source.parts}:
        raise RequestError(
            f"job: {config.job} is {source}, and the sources that a run copies are those of {project}: "
            "call this in the folder of the job's project"
        )
    warn_of_counting(source)
    _warn_of_imports(config, source, project)


def _warn_of_imports(config: JobConfig, path: Path, project: Path) -> None:
    """Log what the file imports and is not there, where this Python is the one that runs it."""
    if config.cluster.container is None and not config.cluster.setup:
        with contextlib.suppress(ConfigError):  # the script itself says what is wrong with it
            _warn_once(read_source(path), project)


@lru_cache(maxsize=16)  # a sweep has one file and many configs
def _warn_once(source: PythonSource, project: Path) -> None:
    for warning in missing_imports(source, project):
        log.warning("%s", warning)


#: Not in the folder for runs. ``%`` and ``\\`` are patterns to Slurm in the names of logs; ``:`` divides PYTHONPATH.
_RESERVED = "%\\:"


def refuse_unfit(runs: Path) -> None:
    """Raise RequestError where the folder ``runs``, the current one or Python has a path that fits no job's script.

    All other characters are quoted where a shell or sbatch reads them. A line break would end an ``#SBATCH`` line.
    """
    for what, path, reserved, remedy in (
        ("the folder for runs", runs, _RESERVED, "choose another: set TOOLKIT_RUNS"),
        ("the current folder", Path.cwd(), "", "go to another one"),
        ("Python", staged.origin(sys.executable), "", "use one in another folder"),
    ):
        bad = next((char for char in str(path) if char in reserved or not is_one_line(char)), None)
        if bad is not None:
            raise RequestError(f"{what}: {str(path)!r} cannot be in a job's script, because of {bad!r}; {remedy}")
    # The folder for runs need not exist yet, but what exists above it must be a folder.
    try:
        there = next(path for path in (runs, *runs.parents) if path.exists())
        why = None if there.is_dir() else f"{there} is not a folder"
    except OSError as error:  # for example, a name that is too long
        why = f"{str(runs)[:200]}: {error.strerror}"
    if why is not None:
        raise RequestError(f"the folder for runs: {why}; choose another: set TOOLKIT_RUNS")
