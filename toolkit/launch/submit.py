"""The login node's door: make a run folder, copy the sources, and hand the run to submitit.

What is submitted is two strings, the run folder and where it runs; submitit's pickle holds nothing else, so an upgrade
of a library between submission and start cannot make it unreadable.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit import config as configs
from toolkit import fsio, rundir
from toolkit.cluster.commands import Slurm, submit_environment
from toolkit.config import ClusterConfig, JobConfig
from toolkit.errors import JobFailedError, RequestError, SlurmError
from toolkit.launch import intent, snapshot
from toolkit.launch.allocation import Allocation
from toolkit.launch.prepare import new_run
from toolkit.rundir import RunDir

EXECUTORS = ("auto", "slurm", "local", "debug")
#: How often a waiting caller asks Slurm whether the job still exists; the run's own files are read each second.
ASK_SLURM_EVERY_S = 30.0
READ_FILES_EVERY_S = 0.5
#: submitit's local executor kills at its time limit and leaves orphans: the limit is set out of reach.
NO_LIMIT_MIN = 60 * 24 * 365


@dataclass(frozen=True)
class Run:
    """A submitted run, as seen from the login node."""

    dir: RunDir
    executor: str
    job_id: str

    @property
    def id(self) -> str:
        """The run id."""
        return self.dir.id

    def status(self) -> dict[str, Any]:
        """What the run's own files say."""
        return self.dir.status()

    def wait(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Wait for the end and return ``result.json``. Raises TimeoutError, or JobFailedError for a job that Slurm
        ended before it could write one."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for _ in self.watch():
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"run {self.id} has not ended after {timeout_s:.0f} s")
        result = self.dir.result()
        assert result is not None
        return result

    def watch(self) -> Iterator[dict[str, Any]]:
        """Yield the status twice a second until the run has ended. Reads files; asks Slurm every 30 s only."""
        ask_at = time.monotonic() + ASK_SLURM_EVERY_S
        while self.dir.result() is None:
            if time.monotonic() >= ask_at or self.executor == "local":
                self._refuse_to_wait_for_nobody()
                ask_at = time.monotonic() + ASK_SLURM_EVERY_S
            yield self.dir.status()
            time.sleep(READ_FILES_EVERY_S)

    def result(self) -> dict[str, Any]:
        """``result.json`` of a completed run. Raises JobFailedError, with the cause, for any other."""
        result = self.dir.result()
        if result is None:
            raise JobFailedError(f"run {self.id} has not ended; wait() for it")
        if result["state"] != "completed":
            raise JobFailedError(f"run {self.id} {result['state']}: {result.get('why', '')}; logs: {self.dir.logs}")
        return result

    def cancel(self) -> None:
        """End the run for good; its checkpoints stay."""
        intent.cancel(self.dir)
        if self.executor == "slurm":
            Slurm().cancel(self.job_id)
            self._write_cancelled_before_start()
        else:
            _signal_supervisor(self.dir, signal.SIGTERM)

    def _write_cancelled_before_start(self) -> None:
        """A job that never started has no supervisor to write its result."""
        if self.dir.status().get("state") == "queued":
            self.dir.write_status({**self.dir.status(), "state": "cancelled", "ended": time.time()})
            self.dir.write_result({"state": "cancelled", "attempts": 0, "metrics": {}, "why": "cancelled in the queue"})

    def _refuse_to_wait_for_nobody(self) -> None:
        if self._is_gone() and self.dir.result() is None:
            raise JobFailedError(
                f"run {self.id}: the job {self.job_id} is over and wrote no result; see {self.dir.submitit} "
                f"and {self.dir.logs}"
            )

    def _is_gone(self) -> bool:
        if self.executor == "local":
            return not _alive(int(self.job_id))
        try:
            status = Slurm().show_jobs([self.job_id])[self.job_id]
        except SlurmError:  # the controller is away: that says nothing about the job
            return False
        return status is not None and status.is_over


def attach(run: RunDir) -> Run:
    """The handle of a run that was submitted earlier, by anybody. Raises RequestError for one that never was."""
    note = run.submission() or run.status()
    if "job_id" not in note:
        raise RequestError(f"run {run.id} was started without a supervisor; end its processes where they run")
    return Run(run, note.get("executor", "slurm"), str(note["job_id"]))


def submit(
    config: str | Path, overrides: Sequence[str] = (), *, executor: str = "auto", project: str | Path = "."
) -> Run:
    """Submit ``config`` with ``key=value`` overrides; returns at once.

    ``executor``: ``slurm``, ``local`` (this machine, in the background), ``debug`` (one rank in this process, for
    breakpoints), or ``auto``: slurm where ``sbatch`` answers, else local. Raises ConfigError before anything exists.
    """
    chosen = choose_executor(executor)
    loaded = configs.load_config(config, overrides)
    _validate(loaded, chosen)
    return _send(new_run(loaded, Path(project).resolve()), loaded, chosen)


def resume(run: RunDir, *, executor: str = "auto") -> Run:
    """Submit an ended run again: it goes on from its last checkpoint with the sources it was submitted with."""
    if run.result() is None and run.status().get("state") not in (None, "failed"):
        raise RequestError(f"run {run.id} is {run.status()['state']}; it can be resumed when it has ended")
    if (run.result() or {}).get("state") == "completed":
        raise RequestError(f"run {run.id} is completed; submit its config.yaml with a larger train.epochs to go on")
    intent.clear(run)
    run.clear_result()
    chosen = choose_executor(executor if executor != "auto" else run.submission().get("executor", "auto"))
    return _send(run, configs.load_config(run.config, site=False), chosen)


def choose_executor(name: str) -> str:
    """``auto`` resolved. Raises RequestError for an unknown name."""
    if name not in EXECUTORS:
        raise RequestError(f"executor: there is no {name!r}; valid: {', '.join(EXECUTORS)}")
    if name != "auto":
        return name
    return "slurm" if Slurm().available() else "local"


def _validate(config: JobConfig, executor: str) -> None:
    configs.validate(config)
    if executor == "local":
        Allocation.local(config.cluster)  # refuses several nodes


def _send(run: RunDir, config: JobConfig, executor: str) -> Run:
    run.write_status({"state": "queued", "run": f"{run.name}/{run.id}", "updated": time.time(), "progress": {}})
    umask = os.umask(0o077)  # submitit's files hold logs too
    try:
        job_id = {"slurm": _send_to_slurm, "local": _send_to_local, "debug": _send_to_debug}[executor](run, config)
    finally:
        os.umask(umask)
    fsio.write_json(run.submitit / "submission.json", {"executor": executor, "job_id": job_id, "time": time.time()})
    return Run(run, executor, job_id)


def _send_to_slurm(run: RunDir, config: JobConfig) -> str:
    import submitit

    from toolkit.launch.supervisor import supervise

    with _only_these(submit_environment(os.environ)), _fewer_words():
        executor = submitit.SlurmExecutor(run.submitit, python=_exec_python())
        executor.update_parameters(**slurm_parameters(config, run))
        return str(executor.submit(supervise, str(run.path), "slurm").job_id)


def _send_to_local(run: RunDir, config: JobConfig) -> str:
    import submitit

    from toolkit.launch.supervisor import supervise

    environ = {**os.environ, **snapshot.environment(run.code, os.environ)}
    with _only_these(environ), _deaf_to_the_terminal(), _fewer_words():
        executor = submitit.LocalExecutor(run.submitit)
        executor.update_parameters(timeout_min=NO_LIMIT_MIN, gpus_per_node=config.cluster.gpus_per_node)
        return str(executor.submit(supervise, str(run.path), "local").job_id)


def _send_to_debug(run: RunDir, config: JobConfig) -> str:
    import submitit

    from toolkit.launch.rank import run_rank

    with _only_these({**os.environ, rundir.RUN_DIR_VARIABLE: str(run.path)}), _fewer_words():
        job = submitit.DebugExecutor(run.submitit).submit(run_rank, str(run.config), [])
        job.result()
        return str(job.job_id)


def _exec_python() -> str:
    """``exec``: a bash between Slurm and the supervisor dies at the first SIGTERM and takes the supervisor along."""
    return f"exec {shlex.quote(sys.executable)}"


def slurm_parameters(config: JobConfig, run: RunDir) -> dict[str, Any]:
    """submitit's parameters for this job: every key of ``cluster`` in Slurm's terms.

    GPUs are asked for at job level: per task they would hide the peers' devices from NCCL.
    """
    cluster = config.cluster
    values: dict[str, Any] = {
        "job_name": config.name,
        "nodes": cluster.nodes,
        "ntasks_per_node": cluster.tasks_per_node,
        "cpus_per_task": cluster.cpus_per_task,
        "gpus_per_node": _gpus(cluster),
        "time": cluster.time_min,
        "exclusive": cluster.exclusive or None,
        "wckey": None,  # submitit's own default, "submitit", is refused where wckeys are enforced
        "use_srun": False,  # the supervisor runs on the batch host, outside any step, and starts srun itself
        "stderr_to_stdout": True,
        "setup": [*_environment_lines(run), *cluster.setup],
        "additional_parameters": {
            "signal": f"B:USR2@{cluster.signal_delay_s}",  # to the supervisor; a rank's default action is to die
            **({} if cluster.mem_gb is None else {"mem": f"{round(cluster.mem_gb * 1024)}M"}),
            **{str(key).replace("_", "-"): _text(value) for key, value in cluster.extra.items() if value is not False},
        },
    }
    for name in ("partition", "account", "qos", "constraint", "exclude"):
        values[name] = _text(getattr(cluster, name))
    return {name: value for name, value in values.items() if value is not None or name == "wckey"}


def _text(value: Any) -> Any:
    """submitit quotes for a shell; sbatch reads a backslash, also between single quotes, as its own escape."""
    return value.replace("\\", "\\\\") if isinstance(value, str) else value


def _gpus(cluster: ClusterConfig) -> str | int | None:
    if cluster.gpus_per_node == 0:
        return None
    return f"{cluster.gpu_type}:{cluster.gpus_per_node}" if cluster.gpu_type else cluster.gpus_per_node


def _environment_lines(run: RunDir) -> list[str]:
    wanted = {**snapshot.environment(run.code, {}), "TOOLKIT_RUNS": str(run.path.parent.parent)}
    wanted["PYTHONPATH"] += "${PYTHONPATH:+:$PYTHONPATH}"
    return [f"export {name}={_quote_keeping_variables(value)}" for name, value in wanted.items()]


def _quote_keeping_variables(value: str) -> str:
    fixed, _, variable = value.partition("${")
    return shlex.quote(fixed) + (f'"${{{variable}"' if variable else "")


def dry_run(config: str | Path, overrides: Sequence[str] = (), *, executor: str = "auto") -> str:
    """What :func:`submit` would send, as text: the sbatch script or the local command, and the resolved config."""
    chosen = choose_executor(executor)
    loaded = configs.load_config(config, overrides)
    _validate(loaded, chosen)
    run = RunDir(rundir.runs_root() / loaded.name / "RUN_ID")
    script = sbatch_script(loaded, run) if chosen == "slurm" else _local_text(loaded)
    return f"{script.rstrip()}\n\n# --- config.yaml (resolved)\n{configs.dump_config(loaded)}"


def sbatch_script(config: JobConfig, run: RunDir) -> str:
    """The text that submitit hands to sbatch, made by submitit itself."""
    from submitit.slurm.slurm import _make_sbatch_string

    command = f"{_exec_python()} -u -m submitit.core._submit {shlex.quote(str(run.submitit))}"
    return str(_make_sbatch_string(command=command, folder=run.submitit, **slurm_parameters(config, run)))


def _local_text(config: JobConfig) -> str:
    ranks = config.cluster.tasks_per_node
    return f"# executor local: no sbatch script; a supervisor and {ranks} rank(s) on this machine"


@contextmanager
def _only_these(environ: Mapping[str, str]) -> Iterator[None]:
    """submitit starts its programs with ``os.environ``: make that ``environ`` for a moment."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _deaf_to_the_terminal() -> Iterator[None]:
    """Children started now ignore Ctrl-C and the terminal's end: submitit's controller would kill the supervisor one
    second after Ctrl-C, with everything unsaved. Ours to handle: whoever waits here tells the supervisor."""
    if threading.current_thread() is not threading.main_thread():  # only there can handlers be set
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _fewer_words() -> Iterator[None]:
    """submitit pickles by reference what it can import; its info lines are not for our users."""
    import logging

    logger = logging.getLogger("submitit")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def _signal_supervisor(run: RunDir, number: signal.Signals) -> None:
    status = run.status()
    pid = status.get("pid")
    if status.get("state") in ("starting", "running", "restarting") and pid and _alive(pid):
        os.kill(pid, number)


def _alive(pid: int) -> bool:
    """Whether the process runs; a zombie, which only waits for its parent to look, does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
