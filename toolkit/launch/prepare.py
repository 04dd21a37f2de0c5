"""Making a run: its folder, the copy of the sources, and a config that means the same wherever it is read."""

from __future__ import annotations

from pathlib import Path

from toolkit import config as configs
from toolkit import fsio, origin, rundir
from toolkit.config import JobConfig
from toolkit.launch import snapshot
from toolkit.launch.script_paths import refuse_unfit
from toolkit.rundir import RunDir


def absolute(config: JobConfig) -> JobConfig:
    """Make ``data.root`` mean the same in every folder; returns ``config``."""
    if config.data.root is not None:
        config.data.root = str(Path(config.data.root).expanduser().absolute())
    return config


def within(project: Path, source: Path) -> str | None:
    """Return the name of a file in the copy of ``project``; None for one that is not in it."""
    for path in (source, source.resolve()):
        if path.is_relative_to(project) and ".." not in path.parts:
            return str(path.relative_to(project))
    return None


def new_run(config: JobConfig, project: Path | None) -> RunDir:
    """A new run of ``config`` with a copy of the sources in ``project``; None: a foreign script runs where it lies.

    A relative ``data.root`` becomes absolute: ranks may start in another folder. So does ``model.init_from``, which may
    be a name that this run has as well. Raises RequestError where no job could use the folder's path.
    """
    refuse_unfit(rundir.runs_root())
    absolute(config)
    if project is not None and config.job.endswith(".py"):  # ranks take the copy, and not the file that it was
        config.job = within(project.resolve(), configs.job_source(config.job, project.resolve())) or config.job
    if config.model.init_from is not None:
        config.model.init_from = str(origin.find(config.model.init_from).path)
    run = rundir.create(config.name)
    try:
        if project is not None:
            snapshot.take(project, run.code)
        fsio.write_atomic(run.config, configs.dump_config(config))
    except BaseException:  # half a run would be listed for ever
        fsio.remove_tree(run.path)
        raise
    return run
