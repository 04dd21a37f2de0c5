"""Runs the user's own command at a run's end: ``notify: [program, argument, ...]``.

The command gets its facts by its environment and by ``result.json`` on its standard input. It cannot change the end:
the result is on disk before it starts, and its failure is one line in the log.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence

from toolkit import config as configs
from toolkit.base import fsio, logs
from toolkit.base.errors import ToolkitError
from toolkit.base.process_limits import limits
from toolkit.files.rundir import RunDir
from toolkit.nodes.start.children import open_log, start_child
from toolkit.nodes.start.foreign import without_snapshot
from toolkit.slurm.environment import submit_environment

log = logs.get(__name__)


def notify(run: RunDir) -> None:
    """Run the command if the config has one and the run has ended. A requeued run has not. Never raises."""
    try:
        result, command = run.result(), configs.load_config(run.config, site=False).notify
        if command and result is not None:
            # Without its job's variables the command may submit another job. Without TOOLKIT_RUN_DIR, too: that job
            # would find it, and continue in the ended run's folder.
            environ = {
                **without_snapshot(submit_environment(os.environ), run.code),
                "TOOLKIT_RUNS": str(run.path.parent.parent),
                "TOOLKIT_NAME": run.name,
                "TOOLKIT_RUN": run.id,
                "TOOLKIT_FOLDER": str(run.path),
                "TOOLKIT_STATE": result.state,
                "TOOLKIT_WHY": result.why or "",
            }
            log.info("notify: %s %s", command[0], _call(run, command, environ))
    except (OSError, ToolkitError) as error:
        log.warning("notify: the command could not be called: %s", error)


def _call(run: RunDir, command: Sequence[str], environ: Mapping[str, str]) -> str:
    """Run the command and return how it went. Without its arguments: one may be the secret address of a webhook."""
    with open_log(run.logs / "notify.log") as output, fsio.open_file(run.path / "result.json") as result_file:
        process = start_child(
            command, environ, end_by=signal.SIGKILL, stdin=result_file, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        code = process.wait(limits().notice_s)
    except subprocess.TimeoutExpired:
        return f"was not done after {limits().notice_s:g} s and is killed; its output: {output.name}"
    finally:
        with contextlib.suppress(ProcessLookupError):  # also what it has left in the background
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return "is done" if code == 0 else f"failed with exit code {code}; its output: {output.name}"
