"""Builds a supervisor from its parts, for a Slurm job or for this machine.

For a job, Slurm's variables and the config choose the parts.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from toolkit import config as configs
from toolkit.base import logs, outages
from toolkit.base.errors import ConfigError, ToolkitError
from toolkit.config import JobConfig
from toolkit.devices import on_node
from toolkit.files.rundir import RunDir
from toolkit.nodes.allocation import Allocation
from toolkit.nodes.start.agent_launcher import AgentLauncher
from toolkit.nodes.start.agent_starters import LocalAgent, SrunAgents
from toolkit.nodes.start.agents import Agents, Endpoint
from toolkit.nodes.start.launcher import Launcher
from toolkit.run.records import ownership
from toolkit.run.supervise import parts
from toolkit.run.supervise.supervisor import Supervisor
from toolkit.slurm.commands import Slurm
from toolkit.slurm.container import Container, outermost
from toolkit.slurm.container import parse as parse_image
from toolkit.slurm.srun_commands import limit_options

log = logs.get(__name__)


def open_endpoint(run: RunDir) -> Endpoint | None:
    """Return the endpoint that outlives a supervisor; None if it cannot be opened.

    Without it each supervisor opens its own, which reports the error.
    """
    try:
        return Endpoint.open(run, Allocation.slurm(os.environ).hosts, os.environ)
    except (OSError, ToolkitError) as error:
        log.warning("a supervisor that is killed would lose what is in the nodes' memory: %s", error)
        return None


def build(run: RunDir, where: str, endpoint: Endpoint | None) -> Supervisor:
    """Return the supervisor of ``run``, with the launcher that its ranks need. ``where`` is ``slurm`` or ``local``."""
    token = os.environ.get(ownership.TOKEN_VARIABLE)
    config = outages.persist(lambda: _config(run, token), run.path, "read")
    if where == "local":
        allocation = Allocation.local(config.cluster)
        container = _container(run, config, allocation)
        agents = Agents(run, allocation, LocalAgent(run))
        launcher: Launcher = AgentLauncher(run, allocation, agents, container)
        return Supervisor(run, config, allocation, launcher, None, agents, container, token)
    slurm = Slurm()
    # One order for all: which nodes are spares is asked by placement, checks of the nodes, and copies.
    allocation = Allocation.slurm(os.environ, slurm).in_order(slurm)
    allocation = replace(allocation, tasks_per_gpu=config.cluster.tasks_per_gpu)
    container = _container(run, config, allocation)
    watch = parts.watch_command(config, run, allocation)
    starter = SrunAgents(run, allocation, limit_options(config.cluster.setup))
    agents = Agents(run, allocation, starter, endpoint, watch_command=watch)
    launcher = parts.launcher(config, run, allocation, slurm, agents, container)
    return Supervisor(run, config, allocation, launcher, slurm, agents, container, token)


def _config(run: RunDir, token: str | None) -> JobConfig:
    """Return the run's config. Raises OSError where a file server that is away hides the folder: that passes."""
    run.config.stat()
    try:
        ownership.adopt_config(run, token)
        return configs.load_config(run.config, site=False)
    except ConfigError:
        run.config.stat()  # it was hidden just now
        raise


def _container(run: RunDir, config: JobConfig, allocation: Allocation) -> Container | None:
    """Return the container, if any. It shows all runs, the start folder, the data, and what the config names."""
    if config.cluster.container is None:
        return None
    here = Path.cwd()
    data = config.data.root or os.environ.get("TOOLKIT_DATA") or "data"
    named = (config.model.init_from, config.checkpoint.copy_to, *config.cluster.container_mounts)
    folders: list[str | Path] = [run.path.parent.parent, here, data, *filter(None, named)]
    gpus = tuple(on_node.apptainer_options()) if allocation.gpus_per_node else ()
    image = parse_image(config.cluster.container)
    return Container(image, outermost(folders), workdir=str(here), code=str(run.code), gpus=gpus)
