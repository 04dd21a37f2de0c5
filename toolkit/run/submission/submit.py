"""The entry point of the login node: makes a run folder, copies the sources, submits, or shows what it would submit."""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from types import NoneType
from typing import Any, TypeAlias

from toolkit import config as configs
from toolkit.base import fsio
from toolkit.base.errors import ConfigError, MaybeQueuedError, RequestError, SlurmError, did_you_mean
from toolkit.config import JobConfig
from toolkit.files import rundir
from toolkit.files.run_files import DependencyRecord, RunResult, RunState, dependency_sentence
from toolkit.files.rundir import RunDir
from toolkit.run.prepare.new_run import check_submittable, load, new_run, refuse_unfit
from toolkit.run.records import ownership
from toolkit.run.records.submitted_run import ShowJobs
from toolkit.run.submission import executors, inside_allocation
from toolkit.run.submission.executors import choose_executor, sbatch_script
from toolkit.run.submission.handle import Run
from toolkit.slurm.commands import Slurm

#: What is submitted: a file, the values of a config, or a job that a file of the project defines.
Submittable: TypeAlias = str | Path | Mapping[str, Any] | Callable[..., object]


def submit(
    config: Submittable,
    overrides: configs.Overrides = (),
    *,
    args: Sequence[object] = (),
    executor: str = "auto",
    project: str | Path = ".",
    after: str | Sequence[str] = (),
) -> Run:
    """Submit ``config``, or a script (``train.py``); return at once.

    ``config`` is a file, or the values of a config as a mapping, which may have ``extends``. In its place a job itself
    may stand: a function ``main(config)`` or a class derived from ``toolkit.Job``, in a file of the project.
    ``overrides`` are ``key=value``, or a mapping of dotted keys to values.

    ``args`` are the script's own arguments, such as ``["--epochs", 3]``: what its ``sys.argv`` is to hold.
    ``executor``: ``slurm``, ``local`` (this machine, in the background), ``debug`` (one rank in this process, for
    breakpoints), or ``auto``: slurm where ``sbatch`` answers, else local. ``after``: runs and sweeps that must have
    completed before it starts. Raises ConfigError or RequestError before anything is created::

        >>> run = toolkit.submit("configs/digits_ddp.yaml", ["train.epochs=3"], executor="local")
        >>> run.wait()["metrics"]["eval/accuracy"] > 0.9
        True
    """
    began_s, folder = time.monotonic(), Path(project).resolve()
    chosen = choose_executor(executor)
    waits_for = awaited(after, chosen)
    loaded = _checked(config, _with_arguments(overrides, args), folder, chosen, waits_for)
    return _send_new(new_run(loaded, folder), loaded, chosen, waits_for, began_s)


def submit_like(run: RunDir, config: str, overrides: Sequence[str], executor: str) -> Run:
    """Submit ``config`` with the copy of the sources that ``run`` has, whatever that has written into the project."""
    began_s, folder, chosen = time.monotonic(), Path.cwd(), choose_executor(executor)
    loaded = _checked(config, overrides, folder, chosen, None)
    return _send_new(new_run(loaded, folder, run), loaded, chosen, None, began_s)


def dry_run(
    config: Submittable, overrides: configs.Overrides = (), *, executor: str = "auto", after: str | Sequence[str] = ()
) -> str:
    """Return what :func:`submit` would send: the sbatch script or local command, and the resolved config."""
    chosen = choose_executor(executor)
    waits_for = awaited(after, chosen)
    return _shown(_checked(config, overrides, Path.cwd(), chosen, waits_for), chosen, waits_for)


def _shown(loaded: JobConfig, chosen: str, waits_for: DependencyRecord | None) -> str:
    """Return what would be sent of a checked config."""
    refuse_unfit(rundir.runs_root())
    run = RunDir(rundir.runs_root() / loaded.name / "RUN_ID")
    if chosen == "slurm":
        script = sbatch_script(loaded, run)
    else:
        ranks = loaded.cluster.tasks_per_node
        first = "cluster.setup, then " if loaded.cluster.setup else ""
        script = f"# executor local: no sbatch script; {first}a supervisor and {ranks} rank(s) on this machine"
    if waits_for is not None:
        script = f"{script.rstrip()}\n\n# {dependency_sentence(waits_for.names())}"
    return f"{script.rstrip()}\n\n# --- config.yaml (resolved)\n{configs.dump_config(loaded)}"


def _with_arguments(overrides: configs.Overrides, args: Sequence[object]) -> list[str]:
    """Return the overrides with the arguments of a script. They come first: ``args.epochs=3`` changes one of them."""
    if isinstance(args, str):
        raise RequestError(f"args: is a list of words: args={args.split()}")
    given = configs.override_texts(overrides)
    return [configs.argv_override([str(word) for word in args]), *given] if args else given


def _checked(
    config: Submittable, overrides: configs.Overrides, folder: Path, executor: str, waits_for: DependencyRecord | None
) -> JobConfig:
    """Return the config of a run that can be submitted. Raises ConfigError or RequestError for any other."""
    config = _values_of(config) if callable(config) else config
    if isinstance(config, Mapping):
        base: Any = config.get("extends")
        values = {key: value for key, value in config.items() if key != "extends"}
        overrides = [*configs.override_texts(values), *configs.override_texts(overrides)]
        if not isinstance(base, (str, Path, NoneType)):
            raise ConfigError(f"extends: takes the name of one file, not {base!r}")
    elif isinstance(config, (str, Path)):
        base = config
    else:
        raise RequestError(
            f"{config!r} cannot be submitted: give the path of a config or a script, a mapping of keys to values, "
            "or a job's class or its function main"
        )
    loaded = load(base, overrides, folder)
    check_submittable(loaded, executor, folder, is_resume=resolve_init_from(loaded, waits_for))
    return loaded


def _values_of(job: Callable[..., object]) -> dict[str, str]:
    """Return the config of a job's class or function: the file that defines it. Raises RequestError without one."""
    name, path = getattr(job, "__qualname__", repr(job)), None
    if isinstance(job, type) or name == "main":
        with suppress(TypeError, OSError):  # of a builtin, or in no file
            path = inspect.getsourcefile(job)
    if path is None or not Path(path).is_file():
        raise RequestError(
            f"{name}: ranks are other processes and import a job from its file: give a class derived from toolkit.Job "
            "or a function main(config) in a file of the project (in a notebook, %%writefile train.py writes a cell)"
        )
    return {"name": Path(path).stem, "job": path}


def awaited(after: str | Sequence[str], executor: str, show_jobs: ShowJobs | None = None) -> DependencyRecord | None:
    """Return what a new run, or a sweep, is to wait for; None for nothing. Raises RequestError if it cannot wait."""
    names = [after] if isinstance(after, str) else [*after]
    if not names:
        return None
    from toolkit.plugins.sweep.awaited import find

    return find(names, executor, show_jobs or Slurm().show_jobs)


def resolve_init_from(config: JobConfig, waits_for: DependencyRecord | None) -> bool:
    """True if the config begins with the weights of a run that is waited for. Its path is written there."""
    if waits_for is None:
        return False
    from toolkit.plugins.sweep.awaited import resolve_init_from

    return bool(resolve_init_from(config, waits_for))


def submit_command(
    command: Sequence[str],
    overrides: configs.Overrides = (),
    *,
    name: str | None = None,
    executor: str = "auto",
    after: str | Sequence[str] = (),
) -> Run:
    """Submit a torchrun-style script as the ranks; return at once. See :func:`submit`."""
    chosen = choose_executor(executor)
    waits_for = awaited(after, chosen)
    return submit_script(_script_config(command, overrides, name), command, chosen, waits_for)


def dry_run_command(
    command: Sequence[str],
    overrides: configs.Overrides = (),
    *,
    name: str | None = None,
    executor: str = "auto",
    after: str | Sequence[str] = (),
) -> str:
    """Return what :func:`submit_command` would send. See :func:`dry_run`."""
    chosen = choose_executor(executor)
    config = _script_config(command, overrides, name)
    check_submittable(config, chosen, Path.cwd())
    return _shown(config, chosen, awaited(after, chosen))


def submit_script(
    config: JobConfig, command: Sequence[str], executor: str, waits_for: DependencyRecord | None = None
) -> Run:
    """Submit ``command`` as the ranks of a valid config whose job is SCRIPT_JOB."""
    config.argv = list(command)
    check_submittable(config, executor, Path.cwd())  # before a run folder is made
    return _send_new(new_run(config, None), config, executor, waits_for)


def supervise_command(command: Sequence[str], overrides: configs.Overrides = (), *, name: str | None = None) -> None:
    """Supervise a user script as the ranks, inside the present sbatch or salloc allocation."""
    config = _script_config(command, overrides, name)
    inside_allocation.enter(lambda allocation: new_run(config, None))


def _script_config(command: Sequence[str], overrides: configs.Overrides, name: str | None) -> JobConfig:
    given = configs.override_texts(overrides)
    config = configs.load_config(None, [configs.argv_override(command), *given, f"job={configs.SCRIPT_JOB}"])
    if name:
        config.name = name
    elif not any(override.startswith("name=") for override in given):
        scripts = [word for word in command if word.endswith((".py", ".sh"))]
        config.name = Path([*scripts, command[0]][0]).stem
    configs.validate(config)
    _refuse_missing_script(command, config)
    return config


def _refuse_missing_script(command: Sequence[str], config: JobConfig) -> None:
    """Raise RequestError where Python would not find its script.

    The ranks may see other files in a container, behind ``cluster.setup``, and in a folder that is not here.
    """
    options = [*takewhile(lambda word: word.startswith("-"), command[1:])]
    script = next(iter(command[1 + len(options) :]), "")
    is_script = script.endswith(".py") and not any(option.startswith(("-c", "-m")) for option in options)
    if not is_script or re.fullmatch(r"python[\d.]*", Path(command[0]).name) is None:
        return
    path = Path(script)
    is_seen_elsewhere = config.cluster.container or config.cluster.setup
    if not (path.is_file() or is_seen_elsewhere or (path.is_absolute() and not path.parent.is_dir())):
        there = sorted(str(other) for other in path.parent.glob("*.py"))
        raise RequestError(
            f"{script}: there is no such file in {Path.cwd()}; {did_you_mean(script, there)}".rstrip("; ")
        )


def _send_new(
    run: RunDir, config: JobConfig, executor: str, waits_for: DependencyRecord | None, began_s: float | None = None
) -> Run:
    """Submit a run for the first time. Leave nothing of a run that Slurm refuses, or that has no room on the disk."""
    try:
        if waits_for is not None:
            fsio.write_json(run.after_path, waits_for.to_json())
        owner = ownership.submit_as(run, executor, ownership.take(run, 0))
        return executors.send(run, config, executor, owner, began_s=began_s)
    except (SlurmError, OSError) as error:
        if run.last_owner_number() > 1:  # sbatch hung until its user resumed the run
            raise
        if isinstance(error, MaybeQueuedError):
            run.write_result(RunResult(RunState.FAILED, attempts=0, metrics={}, why=str(error)))
        else:
            run.remove()
            with suppress(OSError):  # the folder of the name, if it has no other run
                run.path.parent.rmdir()
        raise
