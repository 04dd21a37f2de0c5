"""What to do next about a run: the one place for advice, a function of the run's facts.

`toolkit why`, `status`, `--follow`, `Run.result`, the report and the supervisor's log print what :func:`next_step`
returns. A command in it is complete and does what is said when it is typed as it stands: ``tests/dist/test_advice.py``
types each of them, in the situation that it is given for.
"""

from __future__ import annotations

import math
import shlex
from contextlib import suppress
from dataclasses import dataclass

from toolkit import config as configs
from toolkit.base.errors import ConfigError
from toolkit.checkpoint.folder import newest_step
from toolkit.config import JobConfig
from toolkit.devices.kinds import DEVICE_OUT_OF_MEMORY
from toolkit.files.error_file import ARGUMENT_ERROR
from toolkit.files.run_files import AttemptRecord, RunState, RunStatus, state_word
from toolkit.files.rundir import RUN_DIR_VARIABLE, RunDir
from toolkit.run.attempt.verdict import THEN_PRINTED, is_transient
from toolkit.run.records import run_config

#: The state of a run that has ended without a result.
LOST = "lost"
#: Errors about the config or the surroundings, by their class.
_REFUSALS = ("ConfigError", "RequestError", "PlacementError", "DataMissingError", "OnePassError", "NotFiniteError")


@dataclass(frozen=True)
class Situation:
    """The facts about a run that advice depends on."""

    run: str
    state: str  #: a state of :class:`RunState`, or ``lost``
    saved: int | None = None  #: the step of the newest checkpoint
    lost: int | None = None  #: the step of the one that an attempt has left, where there is none now
    is_script: bool = False  #: of `toolkit exec`: it has checkpoints of its own, and its sources are not copied
    has_copy: bool = True  #: of its sources
    program: str = ""  #: how to start it again, if `toolkit resume` cannot
    has_curves: bool = True
    mended_by: str = ""  #: overrides without which a resume would end in the same way
    refusal: bool = False  #: its last attempt found its config or its surroundings wrong
    bad_arguments: bool = False  #: its script refused its arguments
    where: str | None = None  #: the line from which the exception of its last attempt comes


def next_step(facts: Situation) -> str:
    """Return what to do next, as a sentence without a full stop."""
    if facts.state == RunState.COMPLETED:
        return f"nothing to do{f'; `toolkit tensorboard {facts.run}` shows the curves' if facts.has_curves else ''}"
    if facts.state in (RunState.STOPPED, RunState.CANCELLED):
        return _resume(facts)
    if facts.state == LOST:
        return f"it does not restart by itself; {_resume(facts)}"
    if facts.state == RunState.REQUEUED:
        waits_for = f"what it waits for: `toolkit status {facts.run}`"
        return f"nothing to do; it continues when Slurm starts the job again ({waits_for})"
    if facts.state == RunState.QUEUED:
        return "nothing to do; it begins when Slurm starts its job"
    if facts.state == RunState.STOPPING:
        return "nothing to do: it ends by itself"
    if facts.state in (RunState.STARTING, RunState.RUNNING, RunState.RESTARTING):
        return f"nothing to do; `toolkit logs {facts.run} --follow` shows what it prints"
    if facts.state != RunState.FAILED:
        return f"`toolkit status {facts.run}` shows its state"
    if facts.mended_by:
        return _resume(facts, facts.mended_by)
    if facts.bad_arguments:
        return "submit a new run, with arguments that the script accepts"
    if facts.refusal:
        return f"fix what the error names (a key: KEY=VALUE behind the command), then {_resume(facts)}"
    if facts.where is None:
        return f"fix the cause, then {_resume(facts)}"
    return f"fix {facts.where}, then {_resume(facts, '' if facts.is_script or not facts.has_copy else '--code')}"


def _resume(facts: Situation, words: str = "") -> str:
    """Return ``toolkit resume`` with ``words``, and what it does."""
    if facts.program:
        return facts.program
    command = " ".join(filter(None, ["toolkit resume", facts.run, words]))
    if facts.is_script:
        return f"`{command}` starts the script again, which continues from its own checkpoints if it looks for them"
    does = "continues from the last checkpoint"
    if facts.saved is None and facts.lost is not None:
        does = f"continues once the checkpoint of step {facts.lost} is back"
    elif facts.saved is None:
        does = "starts over, as there is no checkpoint"
    return f"`{command}` {does}{', with the code that the project has then' if words == '--code' else ''}"


def situation_of(run: RunDir, state: str | None = None) -> Situation:
    """Return the facts by the run's own files. ``state`` is what else is known of its state."""
    result, status = run.result(), run.status()
    attempts = run.attempts()
    known = state_word(state or (result.state if result is not None else status.state) or "unknown")
    config = run_config.read(run)
    last = attempts[-1] if attempts else None
    failure = last.first_failure if last is not None and known == RunState.FAILED else None
    where = None if failure is None or is_transient(failure.how) or THEN_PRINTED in failure.how else failure.where
    # The line is to be fixed, unless the cause is known to be elsewhere: a limit, a file, the environment.
    if where is not None:
        from toolkit.plugins.report.why.runs import cause_of

        with suppress(OSError):  # the rules lie with the toolkit, and its disk may be away
            if (cause := cause_of(run)) is not None and not cause.is_of_code:
                where = None
    return Situation(
        run.id,
        known,
        newest_step(run.checkpoints),
        next((line.step_saved for line in reversed(attempts) if line.step_saved is not None), None),
        is_script=config is not None and config.job == configs.SCRIPT_JOB,
        has_copy=run.code.is_dir(),
        program=_how_to_start(run, config),
        has_curves=run.tensorboard.is_dir() and any(run.tensorboard.iterdir()),
        mended_by="" if last is None or config is None or known != RunState.FAILED else _mended_by(run, config, last),
        refusal=failure is not None and failure.how.startswith(tuple(f"{name}:" for name in _REFUSALS)),
        bad_arguments=failure is not None and failure.how.startswith(f"{ARGUMENT_ERROR}: "),
        where=where,
    )


def _how_to_start(run: RunDir, config: JobConfig | None) -> str:
    """Return how to start the run again where `toolkit resume` cannot; empty for other runs."""
    if run.trace.is_dir():
        return "check again: the run is a part of a resume-check, which resumes it itself"
    return rerun_advice(run) if config is not None and config.job == configs.CALLED_JOB else ""


def restart_note(run: RunDir, attempt: int) -> str:
    """Return what a reader should know of a script in its second or a later attempt; empty for other runs.

    Whether it continues from a checkpoint of its own cannot be seen. One that does not ends as completed, too.
    """
    config = run_config.read(run) if attempt > 1 else None
    if config is None or config.job != configs.SCRIPT_JOB:
        return ""
    # It is told, or it has the toolkit's checkpoints.
    is_told = config.restart_args or any("TOOLKIT_ATTEMPT" in word for word in config.argv)
    if is_told or any(line.step_end is not None for line in run.attempts()):
        return ""
    return (
        "a script that is started again continues only if it looks for its own checkpoint; else it starts over and "
        "ends as completed. To tell it which: `toolkit exec --restart-args '--resume {newest:ckpt/*.pt}' -- CMD`"
    )


def rerun_advice(run: RunDir) -> str:
    """Return how to start a run again that a program has started by calling ``toolkit.start()``."""
    return (
        "start its program again, as it was started before, with the run in its environment: "
        f"`export {RUN_DIR_VARIABLE}={shlex.quote(str(run.path))}`"
    )


def after_request(run: RunDir, how: str) -> str:
    """Return what brings a run back that was just asked to ``stop`` or to ``cancel``."""
    if run.result() is not None or how == "cancel":
        return of(run, None if run.result() is not None else RunState.CANCELLED)
    program = situation_of(run).program
    return f"when it has ended, {program or f'`toolkit resume {run.id}` continues from there'}"


def of(run: RunDir, state: str | None = None) -> str:
    """Return what to do next about ``run``."""
    return next_step(situation_of(run, state))


def _mended_by(run: RunDir, config: JobConfig, last: AttemptRecord) -> str:
    """Return the overrides that a run needs which had too little memory or time. Empty for other failures."""
    usage = run.usage().jobs
    is_slurm = last.job_id is not None
    if last.cause == "timeout" and is_slurm and config.cluster.time_min:
        return f"cluster.time_min={2 * config.cluster.time_min}"
    if last.cause != "out_of_memory":
        return ""
    how = "" if last.first_failure is None else last.first_failure.how
    if DEVICE_OUT_OF_MEMORY.search(how):
        # Half of the samples at a time, and the same steps.
        pieces, share = config.train.accumulate * 2, config.data.global_batch_size // max(1, last.world_size or 1)
        return f"train.accumulate={pieces}" if share >= pieces and not _has_loop(config, run) else ""
    asked = usage[-1].memory_bytes if usage else None
    if config.cluster.mem_gb == 0:  # it had all
        return ""
    given = config.cluster.mem_gb or (None if asked is None else math.ceil(asked / (1 << 30)))
    return f"cluster.mem_gb={2 * given:g}" if given and is_slurm else ""


def _has_loop(config: JobConfig, run: RunDir) -> bool:
    """True for a script or loop of the user's, which does not read ``train.accumulate``."""
    try:
        return config.job == configs.SCRIPT_JOB or configs.is_loop(config.job, run.code)
    except ConfigError:
        return True


def end_words(status: RunStatus, state: RunState, attempts: int) -> str:
    """Return how a run ended that was stopped or cancelled while it had no supervisor."""
    if status.state is RunState.REQUEUED:
        return f"{state} while it waited to continue"
    if attempts or (status.state is not None and not status.state.is_waiting):
        return f"{state} after its supervisor had ended"
    return f"{state} before it started"
