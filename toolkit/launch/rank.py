"""One rank: find our place, make the environment that torch reads, and call the job's ``main``.

The same few lines serve a rank under the supervisor, under plain ``srun``, ``torchrun`` or ``mpirun``, and alone.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import re
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from toolkit import chaos, error_file, logs, rundir, signals, stacks
from toolkit import config as configs
from toolkit.cluster import placement
from toolkit.cluster.placement import Placement
from toolkit.cluster.rank_environment import environment
from toolkit.config import JobConfig
from toolkit.errors import ConfigError, StoppedError, ToolkitError
from toolkit.launch.prepare import new_run

log = logs.get(__name__)


def run_rank(config_path: str, overrides: Sequence[str]) -> int:
    """Be one rank of the job in ``config_path``; returns the exit code.

    A failure is written into the run's logs as this rank's own words before it goes on to the caller.
    """
    os.umask(0o077)  # libraries write into the run folder, too
    faulthandler.enable()
    signals.install()  # before anything slow: a stop signal during the imports must not kill
    place: Placement | None = None
    try:
        place = placement.derive(os.environ, socket.gethostname())
        stacks.answer(place.rank)
        _be(place, config_path, overrides)
    except StoppedError as stopped:
        log.info("%s", stopped)
        signals.ignore()
        return stopped.exit_code
    except BaseException as error:
        log.error("%s", error, exc_info=not isinstance(error, ToolkitError))
        number = os.environ.get("SLURM_PROCID", "")
        error_file.write(error, place.rank if place else int(number) if re.fullmatch("[0-9]{1,9}", number) else 0)
        raise
    signals.ignore()
    return 0


def _be(place: Placement, config_path: str, overrides: Sequence[str]) -> None:
    supervised = os.environ.get("TOOLKIT_SUPERVISED") == "1"
    logs.setup(f"rank {place.rank}/{place.world_size} {place.host}")
    for note in place.notes:
        log.warning("%s", note)
    config = configs.load_config(config_path, overrides, site=not supervised)
    if not supervised:
        configs.validate(config, ranks=place.world_size, login_node=False)
        _prepare_unsupervised(config, place)
    os.environ.update(environment(place, os.environ, config.cluster.cpus_per_task))
    with chaos.of_environment(place.rank, placement.whole_number(os.environ, "TOOLKIT_ATTEMPT", 1)):
        _main_of(config)(config)


def _prepare_unsupervised(config: JobConfig, place: Placement) -> None:
    """Rank 0 makes the run folder; the others learn it from the store. A given ``TOOLKIT_RUN_DIR`` is continued."""
    if place.rank != 0:
        return
    log.warning("no supervisor: this run will be neither restarted nor requeued; `toolkit submit` gives both")
    given = os.environ.get(rundir.RUN_DIR_VARIABLE)
    if given:
        log.info("continuing %s", given)
        return
    run = new_run(config, Path.cwd())
    os.environ[rundir.RUN_DIR_VARIABLE] = str(run.path)
    log.info("run folder: %s", run.path)


def _main_of(config: JobConfig) -> Callable[[JobConfig], object]:
    if not os.environ.get("PYTHONSAFEPATH"):  # under a supervisor the copied sources come first, by PYTHONPATH
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(config.job)
    except ModuleNotFoundError as error:
        if error.name is None or not config.job.startswith(error.name):
            raise
        raise ConfigError(f"job: no module {config.job!r} from {Path.cwd()}: {error}") from None
    main: Callable[[JobConfig], object] = module.main
    return main
