"""One rank: find its place, make the environment that torch reads, call the job's ``main``.

The same few lines serve a rank under the supervisor, under plain ``srun``, ``torchrun`` or ``mpirun``, and alone.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import runpy
import socket
import sys
import zlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

from toolkit import config as configs
from toolkit import hang
from toolkit.base import fsio, logs, outages, secret_values, signals, this_node
from toolkit.base.errors import EXIT_DONE, EXIT_STOPPED, ConfigError, RequestError, StoppedError, ToolkitError
from toolkit.base.procfs import ProcessIdentity
from toolkit.config import JobConfig
from toolkit.files import error_file, rundir
from toolkit.files.run_files import RunState
from toolkit.run.prepare import snapshot
from toolkit.run.prepare.new_run import new_run
from toolkit.run.rank import script_end
from toolkit.run.rank.user_job import job_class, load, params_of
from toolkit.run.records import ownership
from toolkit.run.records.submitted_run import SubmittedRun, submitter_of
from toolkit.slurm import placement
from toolkit.slurm.environment import whole_number
from toolkit.slurm.placement import Placement, environment

#: The config of a script with a loop of its own, as a JSON list: a file, or null, and overrides.
CONFIG_VARIABLE = "TOOLKIT_CONFIG"
#: Set in a process that :func:`run_rank` has made a rank already.
JOINED_VARIABLE = "TOOLKIT_JOINED"

#: Faults on demand: see docs/lifecycle.md.
FAULTS_VARIABLE = "TOOLKIT_CHAOS"

log = logs.get(__name__)


def run_rank(config_path: str, overrides: Sequence[str]) -> int:
    """Run one rank of the job in ``config_path``; return the exit code.

    A failure is written into the run's logs as this rank's own error before it is raised to the caller.
    """
    fsio.set_private_umask()  # libraries write into the run folder, too
    faulthandler.enable()
    signals.install()  # before anything slow: a stop signal during the imports must not kill
    place: Placement | None = None
    try:
        place = placement.derive(os.environ, socket.gethostname())
        hang.install_stack_dump(place.rank)
        _run_as_rank(place, config_path, overrides)
    except StoppedError as stopped:
        log.info("%s", stopped)
        signals.ignore()
        return stopped.exit_code
    except SystemExit as ended:  # a script's own end
        if ended.code in (None, EXIT_DONE, EXIT_STOPPED):
            return ended.code or EXIT_DONE
        raise
    except BaseException as error:
        log.error("%s", error, exc_info=not isinstance(error, ToolkitError))
        # Without a place the rank is known only from Slurm's variable, if at all.
        number = os.environ.get("SLURM_PROCID", "")
        error_file.write(error, place.rank if place else int(number) if re.fullmatch("[0-9]{1,9}", number) else 0)
        raise
    signals.ignore()
    return 0


def _run_as_rank(place: Placement, config_path: str, overrides: Sequence[str]) -> None:
    supervised = os.environ.get("TOOLKIT_SUPERVISED") == "1"
    _note(place)
    config = configs.load_config(config_path, overrides, site=not supervised)
    configs.check_torch(config)  # the submission could see this torch only where it ran with the same one
    if not supervised:  # else it was validated at its submission
        configs.validate(config, ranks=place.world_size, login_node=False)
    _prepare(config, place, supervised=supervised)
    attempt = whole_number(os.environ, "TOOLKIT_ATTEMPT", 1)
    # For tests of a user: the rank fails at an exact operation on a file.
    faults: AbstractContextManager[object] = nullcontext()
    if FAULTS_VARIABLE in os.environ:
        from toolkit.plugins.testing.faults import of_environment

        faults = of_environment(place.rank, attempt)
    with faults:
        if configs.is_loop(config.job, _project()):
            # Run a user's own loop as Python would: a script with its folder first on the path, or a module.
            path = configs.job_source(config.job, _project())
            is_script = config.job.endswith(".py")
            _import_from_copy()
            sys.path[:0] = [str(path.parent)] if is_script else [str(_project()), str(_project() / "src")]
            sys.argv = [str(path), *configs.command_line(config)]
            fsio.restore_umask()
            os.environ |= {CONFIG_VARIABLE: json.dumps([config_path, *overrides]), JOINED_VARIABLE: "1"}
            if supervised:  # tells Lightning that the ranks are started already
                os.environ["TORCHELASTIC_RUN_ID"] = Path(os.environ[rundir.RUN_DIR_VARIABLE]).name
            with script_end.end_runs_on_exit():
                if is_script:
                    runpy.run_path(str(path), run_name="__main__")
                else:
                    runpy.run_module(config.job, run_name="__main__", alter_sys=True)
        else:
            module = load(config.job, _project())
            kind = job_class(module)
            if kind is None:
                module.main(config)
            else:
                kind.main(config, params_of(kind, config))


def _note(place: Placement) -> None:
    logs.setup(f"rank {place.rank}/{place.world_size} {place.host}")
    for note in place.notes:
        log.warning("%s", note)


def _import_from_copy() -> None:
    """Have modules of the project come from the run's copy, though an editable installation names the live folders.

    Its folders on the path become the copy's. Its finders come after the path, so the copy is also the path's end.
    """
    copy = _project()
    if (live := snapshot.project_of(copy)) is None:
        return
    copies = {entry: copy / Path(entry).relative_to(live) for entry in sys.path if Path(entry).is_relative_to(live)}
    sys.path[:] = [str(copies[each]) if each in copies and fsio.is_there(copies[each]) else each for each in sys.path]
    sys.path += [str(folder) for folder in (copy / "src", copy) if fsio.is_there(folder)]


def _project() -> Path:
    """Return the folder of the job's sources. It is the run's copy under a supervisor, else the current folder."""
    run = os.environ.get(rundir.RUN_DIR_VARIABLE)
    try:
        code = None if run is None else rundir.RunDir(Path(run)).code
        return code if code is not None and fsio.is_there(code) else Path.cwd()
    except OSError as error:  # such as a name that is too long for a file
        if error.errno in outages.PASSING:
            raise
        raise RequestError(f"{rundir.RUN_DIR_VARIABLE}={run} is not a run: {error.strerror}; unset it") from None


def rank_config(name: str | None = None) -> JobConfig:
    """Return the config of this process, which is a rank under any launcher; for ``toolkit.start()``.

    Under ``toolkit submit``, ``exec`` and ``run`` it is the run's, under another launcher and alone the default one.
    That one's name is ``name``, or that of the script; under submitit that of submitit's job.
    """
    words: list[Any] = json.loads(os.environ.get(CONFIG_VARIABLE, "[null]"))
    path, overrides = words[0], words[1:]
    supervised = os.environ.get("TOOLKIT_SUPERVISED") == "1"
    if JOINED_VARIABLE in os.environ:
        return configs.load_config(path, overrides, site=not supervised)
    # Another launcher has started this process: do here what :func:`run_rank` does for ours.
    faulthandler.enable()
    signals.install()
    place = placement.derive(os.environ, socket.gethostname())
    _note(place)
    hang.install_stack_dump(place.rank)
    name = None if supervised else name or _name_by_submitit()
    if path is None:
        job = _program()
        name = name or _name_of(job)
        overrides = [*overrides, f"job={json.dumps(job)}"]
    if name:
        overrides = [f"name={json.dumps(name)}", *overrides]
    config = configs.load_config(path, overrides, site=not supervised)
    if path is None:  # a later `toolkit resume` starts the program with the same arguments
        config.argv = sys.argv[1:]
    _prepare(config, place, supervised=supervised)
    return config


def _program() -> str:
    """Return the script, or the module, that this process was started with, as ``job`` of a config.

    It is ``CALLED_JOB`` where that does not itself call ``toolkit.start()``, such as submitit or a notebook.
    """
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    job = sys.argv[0] if spec is None else str(spec.name)
    try:
        is_loop = (spec is not None or job.endswith(".py")) and configs.is_loop(job)
    except ConfigError:  # it is not there any more, as in another current folder
        is_loop = False
    return job if is_loop else configs.CALLED_JOB


def _name_of(job: str) -> str | None:
    if job == configs.CALLED_JOB:
        return None
    return Path(job).stem if job.endswith(".py") else job.removesuffix(".__main__").rpartition(".")[2]


def _name_by_submitit() -> str | None:
    """Return a name for a run within a job of submitit's, whose script says nothing. None: in no such job."""
    executor = os.environ.get("SUBMITIT_EXECUTOR")
    if executor is None or Path(sys.argv[0]).name != "_submit.py":
        return None
    name = os.environ.get("SLURM_JOB_NAME", "") if executor == "slurm" else ""
    if name in ("", "submitit"):  # its default
        # Take the file that starts the run.
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "toolkit":
            frame = frame.f_back
        name = "" if frame is None else Path(frame.f_code.co_filename).stem
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).lstrip("._-")[:100] or None


def _prepare(config: JobConfig, place: Placement, *, supervised: bool) -> None:
    """Set the rank's variables. Without a supervisor rank 0 also makes the run, or takes a given one."""
    if not supervised and place.rank == 0:
        _open_run(config)  # the others get its folder from the store
    secret_values.give_to_rank(config.secrets)
    os.environ.update(
        environment(place, os.environ, config.cluster.cpus_per_task) | this_node.cache_variables(os.environ)
    )


def _open_run(config: JobConfig) -> None:
    """Make a run, or take that of ``TOOLKIT_RUN_DIR``. Raises RequestError where another process has it."""
    log.warning("no supervisor: this run will be neither restarted nor requeued; `toolkit submit` gives both")
    given = os.environ.get(rundir.RUN_DIR_VARIABLE)
    if given:
        log.info("continuing %s", given)
        run = rundir.RunDir(Path(given))
    else:
        key = _step_key(config)
        run = _begun_by_step(key) or new_run(config, Path.cwd())
        if key is not None:
            rundir.remember_job(run, key)
        os.environ[rundir.RUN_DIR_VARIABLE] = str(run.path)
        log.info("run folder: %s", run.path)
    os.environ[rundir.OWNER_VARIABLE] = str(_take(run))


def _begun_by_step(key: str | None) -> rundir.RunDir | None:
    """Return the unfinished run that this step of Slurm had before its job was requeued, as submitit does it."""
    if key is None or not whole_number(os.environ, "SLURM_RESTART_COUNT", 0):
        return None
    run = rundir.run_of_job(key)
    result = None if run is None else run.result()
    return None if result is not None and result.state is RunState.COMPLETED else run


def _step_key(config: JobConfig) -> str | None:
    """Return one word for this command of a step of a Slurm job, which is the same after a requeue.

    None where srun did not start this very process. A shell may start several, which nothing tells apart.
    """
    job, step, task = (os.environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_TASK_PID"))
    if not (job.isdecimal() and step.isdecimal()) or task != str(os.getpid()):
        return None
    # A script may leave out steps that it has done: then another command has this one's number.
    command = json.dumps([config.name, config.job, config.argv, str(Path.cwd())])
    cluster = os.environ.get("SLURM_CLUSTER_NAME", "slurm")
    return f"{cluster}-{job}-step-{step}-{zlib.crc32(os.fsencode(command)):08x}"


def _take(run: rundir.RunDir) -> int:
    """Make this process, a rank 0 without a supervisor, the owner of the run. Return its number."""
    if not fsio.is_there(run.path):
        raise RequestError(f"{rundir.RUN_DIR_VARIABLE}={run.path} is not a run: there is no such folder; unset it")
    before, owner, token = ownership.number_of(run), run.owner(), None
    if owner is not None and owner.process == ProcessIdentity.of(os.getpid()):  # `toolkit submit --executor debug`
        token = owner.token
    elif owner is not None and run.result() is None:
        handle = SubmittedRun(run, *submitter_of(run))
        # A launcher may start its ranks again on another node: the number ends those that are left on the first one.
        is_left = owner.executor == "debug" and handle.unknown_state_advice() is not None
        if not (handle.is_over() or is_left):
            raise RequestError(
                f"{rundir.RUN_DIR_VARIABLE}={run.path}: run {run.id} is {run.status().state or RunState.QUEUED}, and "
                "two would write its files; unset the variable for a run of its own, or end that one first: "
                f"{handle.how_to_end()}"
            )
    number = ownership.take(run, before)
    run.clear_result()  # before this process is the owner: who knows of it must find no result of before
    return ownership.submit_as(run, "debug", number, token, serves=True).number
