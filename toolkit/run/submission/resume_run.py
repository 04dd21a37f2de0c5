"""Submits an ended run again, with a changed config if the user wants that."""

from __future__ import annotations

import contextlib
import shlex
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from toolkit import config as configs
from toolkit.base import fsio, secret_values
from toolkit.base.errors import CheckpointError, ConfigError, RequestError
from toolkit.checkpoint.folder import CheckpointFolder, committed
from toolkit.config import JobConfig
from toolkit.config.learning_rate import RateChange, rate_change_by
from toolkit.files import rundir
from toolkit.files.run_files import RunResult, RunState, RunStatus
from toolkit.files.rundir import RunDir
from toolkit.run.attempt import advice
from toolkit.run.job import nodes
from toolkit.run.prepare import snapshot
from toolkit.run.prepare.new_run import absolute_data_root, check_submittable, refuse_unfit
from toolkit.run.prepare.snapshot import acting_on
from toolkit.run.records import ownership, user_requests
from toolkit.run.submission import executors
from toolkit.run.submission.handle import Run, attach
from toolkit.slurm.commands import Slurm


def resume(run: RunDir, overrides: configs.Overrides = (), *, code: bool = False, executor: str = "auto") -> Run:
    """Submit an ended run again. It continues from its last checkpoint with the sources of its submission.

    With ``code`` it uses the sources that the project has now: a second copy of them is made. ``overrides`` change its
    config from now on; a completed run continues if they give it more epochs or steps. Raises RequestError, or
    ConfigError for a change that a run cannot continue with, before any file is changed.
    """
    overrides = configs.override_texts(overrides)
    # Refuse all that can be refused before a file is changed.
    refuse_unfit(run.path)
    if configs.load_config(run.config, site=False).job == configs.CALLED_JOB:
        raise RequestError(f"run {run.id}: the toolkit cannot restart what started it; {advice.rerun_advice(run)}")
    before, result, status = ownership.number_of(run), run.result(), run.status()
    if result is None:
        _refuse_unless_over(run, status)
    rundir.refuse_untrusted_code(run)
    sources = snapshot.sources_of(run)
    project = _project(run) if code else sources if overrides else None
    config = absolute_data_root(configs.load_config(run.config, overrides, site=False, project=project))
    earlier = run.submission() if executor == "auto" else None
    chosen = executors.choose_executor(executor if earlier is None else earlier.executor)
    if (record := run.dependencies()) is not None:
        from toolkit.plugins.sweep import awaited

        awaited.refuse_ended(record, Slurm().show_jobs)
    _check_change(run, configs.load_config(run.config, site=False), config, result, chosen, project if code else None)
    secret_values.check_sources(config.secrets)  # they may have gone since
    # From here on files change; on an error they are put back.
    number, taken = ownership.take(run, before), None
    try:
        # So a job submitted despite the error has a stale token.
        copied = snapshot.new_copy(run, project) if code and project else nullcontext()
        with ownership.restored_on_error(run, number), copied:
            user_requests.clear_intent(run)
            nodes.forget(run)
            # Before this submission is the owner: another one that knows of it must find no result of before.
            run.clear_result()
            taken = ownership.submit_as(run, chosen, number)
            if overrides or code:
                fsio.write_atomic(ownership.new_config(run, taken.token), configs.dump_config(config))
            with snapshot.in_submit_folder(run.path):
                sent = executors.send(run, config, chosen, taken)
    except BaseException:
        if taken is not None:
            ownership.new_config(run, taken.token).unlink(missing_ok=True)
        raise
    # The job is submitted: only now does the new config replace the old one.
    ownership.adopt_config(run, taken.token)
    return sent


def _project(run: RunDir) -> Path:
    """Return the folder that has the current sources. Raises RequestError where there is none."""
    if configs.load_config(run.config, site=False).job == configs.SCRIPT_JOB:
        raise RequestError(f"--code: run {run.id} has no copy of its script: it runs where it lies, as it is now")
    project = snapshot.project_of(run.code)
    if project is None:
        raise RequestError(
            f"--code: the folder from which the sources of run {run.id} were copied is not there any more (its name is "
            f"in {run.code / 'SNAPSHOT.json'}): put it back, or submit a new run"
        )
    return project


def _refuse_unless_over(run: RunDir, status: RunStatus) -> None:
    """Raise RequestError for a run that has a job, or may have one."""
    is_known = run.owner() is not None or ownership.jobs_of(run) != []
    if not is_known and status.state in (None, RunState.FAILED):
        return
    handle = attach(run) if is_known else None
    if handle is None or not (handle.is_elsewhere() or handle.is_over()):
        how = "end its processes where they run" if handle is None else handle.how_to_end()
        raise RequestError(
            (handle and handle.unknown_state_advice())
            or f"run {run.id} is {status.state or RunState.QUEUED}; it can be resumed when it has ended: {how}"
        )


def _is_script(run: RunDir, config: JobConfig) -> bool:
    """True if the run's own code decides how long it is."""
    return config.job == configs.SCRIPT_JOB or configs.is_loop(config.job, run.code.resolve())


def _is_longer(run: RunDir, then: JobConfig, now: JobConfig) -> bool:
    """True if a run that has completed its training with the config ``then`` has more to do with ``now``."""
    if then.train.max_steps is not None and (now.train.max_steps or sys.maxsize) > then.train.max_steps:
        return True
    if now.train.epochs > then.train.epochs and acting_on(run, now.job, now.argv).has_effect("train.epochs"):
        return True
    return _is_script(run, then) and configs.command_line(now) != configs.command_line(then)


def _check_change(
    run: RunDir, then: JobConfig, now: JobConfig, result: RunResult | None, executor: str, code: Path | None = None
) -> None:
    """Raise RequestError, or ConfigError, where the run cannot continue with the changed config."""
    if then.job == configs.SCRIPT_JOB and now.argv != then.argv:
        raise RequestError(
            f"run {run.id}: its command is `{shlex.join(then.argv)}`; args.NAME=VALUE changes an option of it, such as "
            "args.epochs=20, and a new run takes another command"
        )
    # A completed run can continue only if it becomes longer.
    if (
        result is not None
        and result.state is RunState.COMPLETED
        and not (_is_longer(run, then, now) or (code is not None and _is_script(run, then)))
    ):
        steps = f" (and train.max_steps=N to more than {then.train.max_steps} steps)" if then.train.max_steps else ""
        how = f"train.epochs=N` continues to more than its {then.train.epochs} epochs{steps}"
        if _is_script(run, then):
            how = f"args.NAME=VALUE` continues with other arguments of the script, such as args.epochs=20{steps}, and "
            how += "`--code` with its current code"
        raise RequestError(f"run {run.id} is completed; `toolkit resume {run.id} {how}")
    if now != then:
        configs.check_change(then, now)
    if now != then or code is not None:
        check_submittable(now, executor, code or run.code.resolve(), is_resume=True)


def saved_rates(run: RunDir) -> tuple[int, Any]:
    """Return the step of the run's newest readable checkpoint, and the rates that it keeps. None: it keeps none."""
    with contextlib.suppress(CheckpointError):
        for path in committed(run.checkpoints):
            with contextlib.suppress(CheckpointError):
                manifest = CheckpointFolder(run.checkpoints).manifest(path, sizes=False)
                return manifest.step, manifest.meta.get("learning_rate")
    return 0, None


def changed_rate(run: RunDir, step: int, saved: Any) -> RateChange | None:
    """Return what is to be said of the rate with which the resumed ``run`` continues from ``saved``, if anything."""
    try:
        return rate_change_by(saved, step, configs.load_config(run.config, site=False), run.id)
    except (ConfigError, KeyError, TypeError, AttributeError):  # another version of the toolkit kept it
        return None
