"""Start the supervisor: under a guard in a batch job, directly on this machine.

If the supervisor itself fails, write a result that says so.
"""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

from toolkit.base import fsio, logs, outages
from toolkit.base.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, ToolkitError
from toolkit.files.run_files import RunState
from toolkit.files.rundir import RunDir
from toolkit.nodes.agent.die_with_parent import SIGNALS
from toolkit.nodes.start.agents import Endpoint
from toolkit.run.attempt.journal import write_ended
from toolkit.run.attempt.notify import notify
from toolkit.run.records.ownership import Overtaken
from toolkit.run.requeue.requeue import forbid_expedited_requeue, give_back_after_deaths, give_back_if_full
from toolkit.run.supervise.building import build, open_endpoint
from toolkit.run.supervise.guard import SupervisorKilledError, guarded
from toolkit.slurm.commands import Slurm

log = logs.get(__name__)


def supervise(run_dir: str, where: str) -> None:
    """Supervise the run in ``run_dir`` to its end; exit with the job's code. Both entry points end here.

    ``where`` is ``slurm`` (inside an allocation, whose size wins over the config's and is recorded in ``config.yaml``)
    or ``local``.
    """
    run = RunDir(Path(run_dir))
    fsio.keep_private()
    logs.setup("supervisor")
    try:
        if where == "local":
            code = _supervise(run, where, None, None)
        else:
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # held until there is a child to pass them to
            try:
                code = guarded(partial(_supervise, run, where, open_endpoint(run)), partial(_step, run))
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    except SupervisorKilledError as error:
        code = EXIT_STOPPED if give_back_after_deaths(run, error, Slurm()) else EXIT_FAILED
        if code == EXIT_FAILED:
            _write_own_failure(run, error)
    except ToolkitError as error:
        _write_own_failure(run, error)
        code = EXIT_FAILED
    # A run that is over must not be requeued because of the exit code.
    if code != EXIT_DONE:
        if where == "slurm" and run.result() is not None:
            forbid_expedited_requeue(Slurm(), os.environ["SLURM_JOB_ID"])
        raise SystemExit(code)


def _step(run: RunDir) -> int:
    """Return the step reached, or 0 if it cannot be read. A disk's short failure must not end the guard."""
    try:
        return run.step()
    except OSError:
        return 0


def _supervise(run: RunDir, where: str, endpoint: Endpoint | None, earlier_death: str | None) -> int:
    # Held until there are handlers: a `toolkit cancel` at this moment would kill this process, and leave no result.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        outages.persist(lambda: logs.add_file(run.logs / "supervisor.log"), run.logs)
        return build(run, where, endpoint).run(earlier_death)
    except Overtaken as error:
        log.error("%s", error)
        return EXIT_DONE
    except Exception as error:
        if isinstance(error, OSError):
            log.error("%s: %s", run.path, error, exc_info=True)
            # A full disk passes: go back into the queue.
            if where == "slurm" and give_back_if_full(run, error, Slurm()):
                return EXIT_STOPPED
        _write_own_failure(run, error)
        return EXIT_FAILED


def _write_own_failure(run: RunDir, error: Exception) -> None:
    """Write the result of a run whose supervisor failed. Callers that wait for it must learn that it is over."""
    log.error("the supervisor failed: %s", error, exc_info=not isinstance(error, ToolkitError))
    why = f"the supervisor failed: {type(error).__name__}: {error}"
    try:
        outages.persist(lambda: write_ended(run, RunState.FAILED, why), run.path)
    except OSError as also:
        log.error("%s: this could not be written either: %s; `toolkit resume %s` goes on", run.path, also, run.id)
    notify(run)
