"""Makes a run: its folder, a copy of the sources, and its config.

The config is checked first, and its paths mean the same in every folder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from toolkit import config as configs
from toolkit.base import fsio, staged
from toolkit.base.errors import ConfigError, RequestError
from toolkit.config import JobConfig
from toolkit.files import origin, rundir
from toolkit.files.rundir import RunDir
from toolkit.nodes.allocation import Allocation
from toolkit.run.prepare import snapshot
from toolkit.run.prepare.counted_steps import warn_of_counting
from toolkit.run.prepare.script_paths import refuse_unfit
from toolkit.run.prepare.site_checks import check_site
from toolkit.slurm.container import PYXIS
from toolkit.slurm.container import parse as parse_image


def load(config: str | Path | None, overrides: configs.Overrides, project: Path, *, sweep: bool = False) -> JobConfig:
    """Return the config of a run to be submitted. A plain script becomes the command of a foreign job. See load_config.

    A plain script is one that knows nothing of the toolkit: it runs as under torchrun.
    """
    if not str(config).endswith(".py") or configs.is_job(str(config), project):
        return configs.load_config(config, overrides, project=project, sweep=sweep)
    name = f"name={json.dumps(Path(str(config)).stem)}"
    loaded = configs.load_config(
        None, [name, *configs.override_texts(overrides), f"job={configs.FOREIGN_JOB}"], sweep=sweep
    )
    loaded.argv = [str(staged.origin(sys.executable)), str(project / str(config)), *loaded.argv]
    return loaded


def absolute(config: JobConfig) -> JobConfig:
    """Make ``data.root`` mean the same in every folder; return ``config``."""
    if config.data.root is not None:
        config.data.root = str(Path(config.data.root).expanduser().absolute())
    return config


def fix_paths(config: JobConfig, project: Path | None) -> None:
    """Make the config's paths independent of the current folder. Ranks may start in another one.

    ``model.init_from`` becomes a path: it may be a name that this run has as well.
    """
    absolute(config)
    if project is not None and config.job.endswith(".py"):  # ranks use the copy, not the original file
        config.job = within(project.resolve(), configs.job_source(config.job, project.resolve())) or config.job
    if config.model.init_from is not None:
        config.model.init_from = str(origin.find(config.model.init_from, may_come=True).path)


def within(project: Path, source: Path) -> str | None:
    """Return a file's name in the copy of ``project``; None if it is elsewhere."""
    for path in (source, source.resolve()):
        if path.is_relative_to(project) and ".." not in path.parts:
            return str(path.relative_to(project))
    return None


def new_run(config: JobConfig, project: Path | None) -> RunDir:
    """Make a run of ``config`` with a copy of the sources in ``project``.

    A foreign script is not copied: it runs where it lies. Raises RequestError where no job could use the folder's path.
    """
    refuse_unfit(rundir.runs_root())
    fix_paths(config, project)
    run = rundir.create(config.name)
    try:
        if project is not None and config.job != configs.FOREIGN_JOB:
            snapshot.take_first(project, run.path)
        else:
            snapshot.note_folder(run)
        fsio.write_atomic(run.config, configs.dump_config(config))
    except BaseException:  # an incomplete run would be listed for ever
        fsio.remove_tree(run.path)
        raise
    return run


def check_submittable(config: JobConfig, executor: str, project: Path, *, goes_on: bool = False) -> None:
    """Raise ConfigError or RequestError unless this executor can run the config from ``project``'s sources."""
    configs.validate(config, project=project, goes_on=goes_on)
    if executor == "slurm":
        check_site(config)
    if executor == "local":
        Allocation.local(config.cluster)  # refuses several nodes
        if config.cluster.container is not None and parse_image(config.cluster.container).runtime == PYXIS:
            raise ConfigError("cluster.container: Pyxis is a part of Slurm, and this is to run without it")
    if config.job == configs.FOREIGN_JOB:  # a foreign script is not copied: it runs where it lies
        if executor == "debug":
            raise RequestError("executor: a foreign script cannot be debugged in this process; use local")
        return
    source = configs.job_source(config.job, project)  # may be a link, which is copied with the package that it leads to
    if within(project, source) is None and not {"site-packages", "dist-packages"} & {*source.parts}:
        raise RequestError(
            f"job: {config.job} is {source}, and the sources that a run copies are those of {project}: "
            "call this in the folder of the job's project"
        )
    warn_of_counting(source)
