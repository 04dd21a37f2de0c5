"""The entry point of the login node: makes a run folder, copies the sources, submits by submitit.

submitit's pickle holds two strings, the run folder and where it runs, and nothing else. So an upgrade of a library
between submission and start cannot make it unreadable.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from toolkit import config as configs
from toolkit import fsio, logs, rundir
from toolkit.config import ClusterConfig, JobConfig
from toolkit.errors import ConfigError, JobFailedError, RequestError, SlurmError
from toolkit.launch.job import follow_up, nodes
from toolkit.launch.job.allocation import Allocation
from toolkit.launch.job.requeue import forbid_expedited_requeue
from toolkit.launch.record import ownership, request
from toolkit.launch.record.journal import write_ended
from toolkit.launch.record.ownership import Owner
from toolkit.launch.record.request import Intent
from toolkit.launch.start.foreign import write_command
from toolkit.launch.submission import inside_allocation, snapshot
from toolkit.launch.submission.prepare import absolute, new_run, within
from toolkit.launch.submission.script_paths import refuse_unfit
from toolkit.rundir import RunDir
from toolkit.slurm.commands import Slurm
from toolkit.slurm.container import PYXIS
from toolkit.slurm.container import parse as parse_image
from toolkit.slurm.environment import submit_environment

log = logs.get(__name__)

EXECUTORS = ("auto", "slurm", "local", "debug")
#: A waiting caller asks Slurm this often whether the job still exists, and reads the run's own files twice a second.
ASK_SLURM_EVERY_S = 30.0
READ_FILES_EVERY_S = 0.5
#: A job's last file may reach the login node this long after the job's end: NFS remembers for up to 60 s that a file
#: was absent. Only after that time is it certain that the job has written no result.
FILES_LAG_S = 75.0
#: submitit's local executor kills at its time limit and leaves orphans, so the limit is set out of reach.
NO_LIMIT_MIN = 60 * 24 * 365


@dataclass(frozen=True)
class Run:
    """A submitted run, as seen from the login node::

    >>> run = toolkit.submit("configs/digits_ddp.yaml", ["train.epochs=1"], executor="local")
    >>> run.wait()["state"], run.status()["attempt"]
    ('completed', 1)
    """

    dir: RunDir
    executor: str
    job_id: str  #: at submission, see `job_now`; empty where the submission was interrupted

    @property
    def id(self) -> str:
        """Return the run id."""
        return self.dir.id

    def status(self) -> dict[str, Any]:
        """Return what the run's own files say."""
        return self.dir.status()

    def wait(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Wait for the end and return ``result.json``.

        Raises TimeoutError, or JobFailedError for a job that ended before it could write a result, or whose run folder
        is gone.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for _ in self.watch():
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"run {self.id} has not ended after {timeout_s:.0f} s")
        result = self.dir.result()
        assert result is not None
        return result

    def watch(self) -> Iterator[dict[str, Any]]:
        """Yield the status twice a second until the run has ended.

        Reads files. Slurm is asked every 30 s, and only while the status does not change: a live supervisor rewrites it
        all the time, and a thousand waiting callers would keep the controller busy.
        """
        ask_at = time.monotonic() + ASK_SLURM_EVERY_S
        over_since: float | None = None
        status: dict[str, Any] = {}
        while self.dir.result() is None:
            now, before, status = time.monotonic(), status, self.dir.status()
            # A new status proves that the supervisor lives, so the next question to Slurm can wait.
            if self.executor == "slurm" and status != before:
                ask_at, over_since = now + ASK_SLURM_EVERY_S, None
            # A local process is checked in each round: that costs nothing.
            if now >= ask_at or self.executor != "slurm":
                ask_at = now + ASK_SLURM_EVERY_S
                over_since = (over_since or now) if self.is_over() else None
            if over_since is not None:
                self._refuse_to_wait_for_nobody(now - over_since)
            yield status
            time.sleep(READ_FILES_EVERY_S)

    def result(self) -> dict[str, Any]:
        """Return ``result.json`` of a completed run. Raises JobFailedError, with the cause, for any other."""
        result = self.dir.result()
        if result is None:
            raise JobFailedError(f"run {self.id} has not ended; wait() for it")
        if result["state"] != "completed":
            raise JobFailedError(f"run {self.id} {result['state']}: {result.get('why', '')}; logs: {self.dir.logs}")
        return result

    def cancel(self) -> None:
        """End the run for good; its checkpoints stay. Raises RequestError for a local run of another machine."""
        self._end(Intent.CANCEL)

    def stop(self) -> None:
        """Have the ranks commit a checkpoint and end; the run is not requeued, :func:`resume` goes on with it.

        Raises RequestError for a local run of another machine.
        """
        self._end(Intent.STOP)

    def _end(self, what: Intent) -> None:
        if self.executor != "slurm" and not self._is_here():
            raise RequestError(f"run {self.id} runs on {self._host()}; call `toolkit {what} {self.id}` there")
        request.ask(self.dir, what)  # first: a job that starts at this moment finds the request
        if self.executor == "slurm":
            is_over = self._end_jobs(what)
        else:
            owner = ownership.read(self.dir)
            if owner is not None and _is_process_of(self.dir, owner.pid):  # else it finds the request at its start
                os.kill(owner.pid, signal.SIGTERM)
            is_over = self._is_over()
        # Without a supervisor that could write the result, write it here.
        if is_over and not ownership.is_being_submitted(self.dir, ownership.read(self.dir)):
            self._write_ended(what)

    def _end_jobs(self, what: Intent) -> bool:
        """Cancel or signal the run's jobs; True if no job is left that could write a result.

        The last follow-up job comes first, because each would start when those before it have ended.
        """
        slurm, jobs = Slurm(), self._jobs()
        answers = slurm.show_jobs(jobs) if jobs else {}
        for job in reversed(jobs):
            status = answers[job]
            # A job that still waits has nothing to save, so also a stop cancels it.
            if what is Intent.CANCEL or ownership.waits(status):
                slurm.cancel(job)
            elif status is not None and not status.is_over and status.state != "COMPLETING":
                slurm.cancel(job, signal="USR1", batch=True)
        return all(status is None or status.is_over or ownership.waits(status) for status in answers.values())

    @property
    def job_now(self) -> str:
        """The job that serves the run at present. It may be a follow-up job of the submitted one."""
        return self._jobs()[0]

    def _jobs(self) -> list[str]:
        return ownership.jobs_of(self.dir) or list(filter(None, [self.job_id]))

    def _write_ended(self, what: Intent) -> None:
        """Write the result for a job that waits in the queue, or died. It has no supervisor to do so."""
        if self.dir.result() is None:
            state = "cancelled" if what is Intent.CANCEL else "stopped"
            write_ended(self.dir, state, f"{state} while no supervisor ran")

    def _refuse_to_wait_for_nobody(self, over_for_s: float) -> None:
        if not self.dir.path.is_dir():
            raise JobFailedError(f"run {self.id}: its folder {self.dir.path} is gone")
        list(self.dir.path.iterdir())  # reading the folder makes NFS forget that a file was absent
        wait_s = FILES_LAG_S if self.executor == "slurm" else 0.0
        if over_for_s < wait_s or self.dir.result() is not None:
            return
        asked = request.asked(self.dir)
        if asked is not None:  # the request reached a job that died, or went back into the queue, at that moment
            self._write_ended(asked)
            return
        raise JobFailedError(
            f"run {self.id}: {self._last_owner()} is over and wrote no result; see {self.dir.submitit} "
            f"and {self.dir.logs}; `toolkit resume {self.id}` goes on from the last checkpoint"
        )

    def _last_owner(self) -> str:
        jobs = self._jobs()
        others = f", with its follow-up jobs {', '.join(jobs[1:])}," if len(jobs) > 1 else ""
        return f"the job {jobs[0]}{others}" if jobs else "its submission"

    def is_over(self) -> bool:
        """True if no process can write this run's result any more; False where Slurm does not answer."""
        if ownership.is_being_submitted(self.dir, ownership.read(self.dir)):
            return False
        try:
            return self._is_over()
        except SlurmError:  # the controller is away, which says nothing about the job
            return False

    def _is_over(self) -> bool:
        if self.executor == "debug":
            return True
        if self.executor == "local":
            owner = ownership.read(self.dir)
            # A local run is its owner's processes; a run on Slurm is the present job of its chain of follow-up jobs.
            pids: list[int | str] = [*self._jobs(), *([owner.pid] if owner else [])]
            return self._is_here() and not any(_is_process_of(self.dir, pid) for pid in pids)
        jobs = self._jobs()
        status = ownership.present(jobs, Slurm().show_jobs(jobs))[1] if jobs else None
        return status is None or status.is_over

    def _host(self) -> str | None:
        """Return the host on which a local run was started."""
        host: str | None = self.dir.submission().get("host")
        return host

    def _is_here(self) -> bool:
        return self._host() in (None, socket.gethostname())


def attach(run: RunDir) -> Run:
    """Return the handle of an earlier run, of any process. Raises RequestError for one that was never submitted."""
    owner, jobs = ownership.read(run), ownership.jobs_of(run)
    if ownership.is_being_submitted(run, owner):
        raise RequestError(f"run {run.id} is being submitted at this moment; try again when it has a job id")
    if jobs or owner is not None:  # after an interrupted submission the job id is unknown
        executor = owner.executor if owner is not None else run.submission().get("executor", "slurm")
        return Run(run, executor, jobs[0] if jobs else "")
    # Neither owner nor job: the reason is a damaged file, or a run that was started without a supervisor.
    damage: list[str] = []
    run.owner(damage), run.submission(damage), run.status(damage)
    why = f"which job it is cannot be said: {'; '.join(damage)}" if damage else "it was started without a supervisor"
    raise RequestError(f"run {run.id}: {why}; end its processes where they run")


def submit(
    config: str | Path, overrides: Sequence[str] = (), *, executor: str = "auto", project: str | Path = "."
) -> Run:
    """Submit ``config`` with ``key=value`` overrides; return at once. A script (``train.py``) may stand for ``config``.

    ``executor``: ``slurm``, ``local`` (this machine, in the background), ``debug`` (one rank in this process, for
    breakpoints), or ``auto``: slurm where ``sbatch`` answers, else local. Raises ConfigError before anything is
    created::

        >>> run = toolkit.submit("configs/digits_ddp.yaml", ["train.epochs=3"], executor="local")
        >>> run.wait()["metrics"]["eval/accuracy"] > 0.9
        True
    """
    folder = Path(project).resolve()
    if str(config).endswith(".py") and not configs.is_job(str(config), folder):
        return submit_command([sys.executable, str(folder / config)], overrides, executor=executor)
    chosen = choose_executor(executor)
    loaded = configs.load_config(config, overrides, project=folder)
    _validate(loaded, chosen, folder)
    return _send_new(new_run(loaded, folder), loaded, chosen)


def submit_command(
    command: Sequence[str], overrides: Sequence[str] = (), *, name: str | None = None, executor: str = "auto"
) -> Run:
    """Submit a foreign, torchrun-style script as the ranks; return at once. See :func:`submit`."""
    chosen = choose_executor(executor)
    if chosen == "debug":
        raise RequestError("executor: a foreign script cannot be debugged in this process; use local")
    config = _foreign_config(command, overrides, name)
    if chosen == "local":
        # Refuse what does not fit this machine before a run folder is made.
        Allocation.local(config.cluster)
    return _send_new(_new_foreign_run(config, command), config, chosen)


def _send_new(run: RunDir, config: JobConfig, executor: str) -> Run:
    """Submit a run for the first time. Leave nothing of a run that Slurm refuses, or that has no room on the disk."""
    with _removed_on_error(run):
        return _send(run, config, executor, ownership.submit_as(run, executor, ownership.take(run, 0)))


@contextmanager
def _removed_on_error(run: RunDir) -> Iterator[None]:
    try:
        yield
    except (SlurmError, OSError):
        fsio.remove_tree(run.path)
        raise


def supervise_command(command: Sequence[str], overrides: Sequence[str] = (), *, name: str | None = None) -> None:
    """Supervise a foreign script as the ranks, inside the present sbatch or salloc allocation."""
    config = _foreign_config(command, overrides, name)
    inside_allocation.enter(lambda allocation: _new_foreign_run(config, command))


def _foreign_config(command: Sequence[str], overrides: Sequence[str], name: str | None) -> JobConfig:
    config = configs.load_config(None, [*overrides, f"job={configs.FOREIGN_JOB}"])
    scripts = [word for word in command if word.endswith((".py", ".sh"))]
    is_named = any(override.startswith("name=") for override in overrides)
    config.name = name or (config.name if is_named else Path(scripts[0] if scripts else command[0]).stem)
    configs.validate(config)
    return config


def _new_foreign_run(config: JobConfig, command: Sequence[str]) -> RunDir:
    run = new_run(config, None)
    with _removed_on_error(run):
        write_command(run, command)
    return run


def resume(run: RunDir, overrides: Sequence[str] = (), *, executor: str = "auto") -> Run:
    """Submit an ended run again: it goes on from its last checkpoint with the sources it was submitted with.

    ``overrides`` change its config from now on; a completed run goes on if they give it more epochs or steps. Raises
    RequestError, or ConfigError for a change that a run cannot go on with, before any file is changed.
    """
    # Refuse all that can be refused before a file is changed.
    refuse_unfit(run.path)
    before, result, status = ownership.number_of(run), run.result(), run.status()
    if result is None:
        _refuse_unless_over(run, status)
    rundir.refuse_code_of_others(run)
    project = run.code.resolve() if overrides and run.code.is_dir() else None
    config = absolute(configs.load_config(run.config, overrides, site=False, project=project))
    chosen = choose_executor(executor if executor != "auto" else run.submission().get("executor", "auto"))
    _check_change(run, configs.load_config(run.config, site=False), config, result, chosen)
    # From here on files change; on an error they are put back.
    kept = [run.path / name for name in ("owner.json", "status.json", "intent.json", "nodes.json", "result.json")]
    number = ownership.take(run, before)
    try:
        with fsio.unchanged_on_error(*kept):  # so a job submitted despite the error has a stale token
            taken = ownership.submit_as(run, chosen, number)
            if overrides:
                fsio.write_atomic(ownership.new_config(run, taken.token), configs.dump_config(config))
            request.clear(run)
            nodes.forget(run)
            run.clear_result()
            sent = _send(run, config, chosen, taken)
    except BaseException:
        for config_of_token in run.submitit.glob("config-*.yaml"):
            config_of_token.unlink()
        run.give_back_number(number)
        raise
    # The job is submitted: only now does the new config replace the old one.
    ownership.adopt_config(run, taken.token)
    return sent


def _refuse_unless_over(run: RunDir, status: Mapping[str, Any]) -> None:
    """Raise RequestError for a run that has a job, or may have one."""
    is_known = ownership.read(run) is not None or ownership.jobs_of(run) != []
    if not is_known and status.get("state") in (None, "failed"):
        return
    if not is_known or not attach(run).is_over():
        raise RequestError(
            f"run {run.id} is {status.get('state', 'queued')}; it can be resumed when it has ended: "
            f"`toolkit cancel {run.id}` ends it"
        )


def _check_change(
    run: RunDir, then: JobConfig, now: JobConfig, result: Mapping[str, Any] | None, executor: str
) -> None:
    """Raise RequestError, or ConfigError, where the run cannot go on with the changed config."""
    longer = now.train.epochs > then.train.epochs or (
        then.train.max_steps is not None and (now.train.max_steps or sys.maxsize) > then.train.max_steps
    )
    # A completed run can go on only to more epochs or steps.
    if result is not None and result["state"] == "completed" and not longer:
        raise RequestError(
            f"run {run.id} is completed; `toolkit resume {run.id} train.epochs=N` goes on to more than its "
            f"{then.train.epochs} epochs"
            + (f" (and train.max_steps=N to more than {then.train.max_steps} steps)" if then.train.max_steps else "")
        )
    if now != then:
        configs.check_change(then, now)
        _validate(now, executor, run.code.resolve(), goes_on=True)


def choose_executor(name: str) -> str:
    """Resolve ``auto`` and return the executor. Raises RequestError for an unknown name."""
    if name not in EXECUTORS:
        raise RequestError(f"executor: there is no {name!r}; valid: {', '.join(EXECUTORS)}")
    if name != "auto":
        return name
    if Slurm().available():
        return "slurm"
    if shutil.which("sbatch"):
        log.warning(
            "sbatch is here but its controller does not answer: running on this machine (--executor slurm insists)"
        )
    return "local"


def _validate(config: JobConfig, executor: str, project: Path, *, goes_on: bool = False) -> None:
    configs.validate(config, project=project, goes_on=goes_on)
    if executor == "local":
        Allocation.local(config.cluster)  # refuses several nodes
        if config.cluster.container is not None and parse_image(config.cluster.container).runtime == PYXIS:
            raise ConfigError("cluster.container: Pyxis is a part of Slurm, and this is to run without it")
    if config.job == configs.FOREIGN_JOB:  # a foreign script is not copied: it runs where it lies
        return
    source = configs.job_source(config.job, project)  # may be a link, which is copied with the package that it leads to
    if within(project, source) is None and not {"site-packages", "dist-packages"} & {*source.parts}:
        raise RequestError(
            f"job: {config.job} is {source}, and the sources that a run copies are those of {project}: "
            "call this in the folder of the job's project"
        )


def _send(run: RunDir, config: JobConfig, executor: str, owner: Owner) -> Run:
    status = {"state": "queued", "run": f"{run.name}/{run.id}", "updated": time.time(), "progress": {}}
    left_over = run.left_over()
    run.write_status(status if left_over is None else {**status, "left_over": left_over})
    umask = os.umask(0o077)  # submitit's files hold logs too
    try:
        send = {"slurm": _send_to_slurm, "local": _send_to_local, "debug": _send_to_debug}[executor]
        job_id = send(run, config, owner.token)
    finally:
        os.umask(umask)
    sent = Run(run, executor, job_id)
    # A job whose id cannot be written down is cancelled: no later command would find it.
    try:
        fsio.write_json(run.submitit / "submission.json", ownership.as_note(owner, [job_id]))
    except OSError:
        if executor == "slurm":
            _cancel([job_id])
            raise
        log.warning("%s could not be written", run.submitit / "submission.json", exc_info=True)
    if executor == "slurm":
        _send_follow_up(run, config, owner, job_id)
    return sent


def _cancel(jobs: Sequence[str]) -> None:
    """Cancel jobs that could not be recorded as the run's, because the disk is full."""
    for job_id in jobs:
        with suppress(SlurmError):
            Slurm().cancel(job_id)


def _send_to_slurm(run: RunDir, config: JobConfig, token: str) -> str:
    import submitit

    from toolkit.launch.supervise.entry import supervise

    submitted: list[str] = []

    class KnownJob(submitit.SlurmJob[Any]):
        """A job recorded here as soon as sbatch has taken it. After that submitit writes files, and may fail to."""

        def __init__(self, folder: Path | str, job_id: str, tasks: Sequence[int] = (0,)) -> None:
            submitted.append(job_id)
            super().__init__(folder, job_id, tasks)

    with _only_these(submit_environment(os.environ)), _fewer_words():
        try:
            executor = submitit.SlurmExecutor(run.submitit, python=_exec_python())
            executor.job_class = KnownJob
            parameters = slurm_parameters(config, run, token)
            # Not in slurm_parameters: a follow-up job is never requeued.
            if _may_expedite(config):
                parameters["additional_parameters"]["requeue"] = "expedite"
            executor.update_parameters(**parameters)
            return str(executor.submit(supervise, str(run.path), "slurm").job_id)
        except RuntimeError as error:  # submitit's FailedJobError holds what sbatch printed, its others are like it
            raise SlurmError(f"nothing was submitted: {str(error).strip()}") from error
        except OSError:
            _cancel(submitted)
            raise


def _may_expedite(config: JobConfig) -> bool:
    """True if Slurm can restart the job at once after a requeue. A job that has lost a node comes before all others."""
    flags = {str(key).replace("_", "-") for key in config.cluster.extra}
    if flags & {"requeue", "no-requeue"}:
        return False
    try:
        return Slurm().expedites()
    except SlurmError as error:
        log.debug("Slurm does not say whether it expedites requeues: %s", error)
        return False


def _send_follow_up(run: RunDir, config: JobConfig, owner: Owner, job_id: str) -> None:
    """Submit a follow-up job where Slurm may end the job for good. It may do so before the job could submit one."""
    slurm = Slurm()
    try:
        row = slurm.show_job(job_id)
        if row is None or not follow_up.are_needed(row, slurm.settings(), slurm):
            return
    except SlurmError as error:
        log.warning("whether a preemption cancels job %s is not known before it starts: %s", job_id, error)
        return
    follower = follow_up.submit(run, slurm, _follow_up_script(run, config, owner.token, job_id), [job_id])
    if follower is None:
        return
    forbid_expedited_requeue(slurm, job_id)  # the follow-up job waits for an end that a queued job never has
    try:
        fsio.write_json(run.submitit / "submission.json", ownership.as_note(owner, [job_id, follower]))
    except OSError as error:  # an unrecorded job could not be found; the first job submits another when it starts
        log.warning("the follow-up job %s is given up: %s", follower, error)
        follow_up.dismiss([follower], slurm)


def _follow_up_script(run: RunDir, config: JobConfig, token: str, job_id: str) -> str:
    """Return the script of a follow-up job. It lacks requests about one job's place in the queue."""
    from submitit.slurm.slurm import _make_sbatch_string

    extra = {key: value for key, value in config.cluster.extra.items() if not follow_up.is_for_one_job(key)}
    values = slurm_parameters(replace(config, cluster=replace(config.cluster, extra=extra)), run, token)
    variables = follow_up.environment(run, [job_id])
    values["setup"] += [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    return str(_make_sbatch_string(command=follow_up.command(run), folder=run.submitit, **values))


def _send_to_local(run: RunDir, config: JobConfig, token: str) -> str:
    import submitit

    from toolkit.launch.supervise.entry import supervise

    # As on Slurm, imports come from the run's copy of the sources.
    environ = {**submit_environment(os.environ), **snapshot.environment(run.code, os.environ)}
    environ[ownership.TOKEN_VARIABLE] = token
    log_path = run.submitit / "controller.log"
    with _only_these(environ), _ignoring_the_terminal(), _fewer_words(), _output_to(log_path):
        executor = submitit.LocalExecutor(run.submitit)
        executor.update_parameters(timeout_min=NO_LIMIT_MIN, gpus_per_node=config.cluster.gpus_per_node)
        return str(executor.submit(supervise, str(run.path), "local").job_id)


def _send_to_debug(run: RunDir, config: JobConfig, token: str) -> str:
    import submitit

    from toolkit.launch.start.rank import run_rank

    with _only_these({**os.environ, rundir.RUN_DIR_VARIABLE: str(run.path)}), _fewer_words():
        job = submitit.DebugExecutor(run.submitit).submit(run_rank, str(run.config), [])
        job.result()
        return str(job.job_id)


def _exec_python() -> str:
    """Return the Python command with ``exec``. A bash between Slurm and the supervisor dies at the first SIGTERM and
    takes the supervisor along."""
    return f"exec {shlex.quote(sys.executable)}"


def slurm_parameters(config: JobConfig, run: RunDir, token: str) -> dict[str, Any]:
    """Return submitit's parameters for this job: every key of ``cluster`` in Slurm's terms.

    GPUs are asked for at job level: a request per task would hide the peers' devices from NCCL.
    """
    cluster = config.cluster
    values: dict[str, Any] = {
        "job_name": config.name,
        "nodes": cluster.nodes + cluster.spare_nodes,
        "ntasks_per_node": cluster.tasks_per_node,
        "cpus_per_task": cluster.cpus_per_task,
        "gpus_per_node": _gpus(cluster),
        "time": cluster.time_min,
        "exclusive": cluster.exclusive or None,
        "wckey": None,  # submitit's own default, "submitit", is refused where wckeys are enforced
        "use_srun": False,  # the supervisor runs on the batch host, outside any step, and starts srun itself
        "stderr_to_stdout": True,
        "setup": [*cluster.setup, *_environment_lines(run, token)],  # ours last: `module load` may set PYTHONPATH
        "additional_parameters": {
            "signal": f"B:USR2@{cluster.signal_delay_s}",  # to the supervisor; a rank's default action is to die
            # With spares the job outlives a dead node.
            **({"no-kill": True} if _outlives_nodes(config) else {}),
            **({} if cluster.mem_gb is None else {"mem": f"{round(cluster.mem_gb * 1024)}M"}),
            **{str(key).replace("_", "-"): _text(value) for key, value in cluster.extra.items() if value is not False},
        },
    }
    for name in ("partition", "account", "qos", "constraint", "exclude"):
        values[name] = _text(getattr(cluster, name))
    return {name: value for name, value in values.items() if value is not None or name == "wckey"}


def _outlives_nodes(config: JobConfig) -> bool:
    """True if Slurm is to leave the job alone when a node dies. Never for a single node: no process would be left to
    requeue it, see `toolkit.launch.watch.batch_host_watch`."""
    cluster = config.cluster
    return cluster.nodes + cluster.spare_nodes > 1 and (cluster.spare_nodes > 0 or config.retry.allow_fewer_nodes)


#: Flags of sbatch without a config key of their own that decide whether and where srun gets nodes.
_PLACING = ("nodelist", "reservation", "wckey", "licenses")


def srun_options(config: JobConfig) -> list[str]:
    """Return the node choice of ``cluster`` as options of srun, which holds nodes for seconds from the login node."""
    cluster = config.cluster
    values: dict[str, Any] = {"job-name": "doctor", "time": 5, "gpus-per-node": _gpus(cluster)}
    values |= {name: getattr(cluster, name) for name in ("partition", "account", "qos", "constraint", "exclude")}
    values |= {name: cluster.extra.get(name) for name in _PLACING}
    options = [f"--{name}={value}" for name, value in values.items() if value is not None]
    return [*options, "--exclusive"] if cluster.exclusive else options


def _text(value: Any) -> Any:
    """Escape backslashes: submitit quotes for a shell, but sbatch reads one as an escape also in single quotes."""
    return value.replace("\\", "\\\\") if isinstance(value, str) else value


def _gpus(cluster: ClusterConfig) -> str | int | None:
    if cluster.gpus_per_node == 0:
        return None
    return f"{cluster.gpu_type}:{cluster.gpus_per_node}" if cluster.gpu_type else cluster.gpus_per_node


def _environment_lines(run: RunDir, token: str) -> list[str]:
    wanted = {**snapshot.environment(run.code, {}), "TOOLKIT_RUNS": str(run.path.parent.parent)}
    wanted[ownership.TOKEN_VARIABLE] = token
    quoted = {name: shlex.quote(value) for name, value in wanted.items()}
    quoted["PYTHONPATH"] += '"${PYTHONPATH:+:$PYTHONPATH}"'
    return [f"export {name}={value}" for name, value in quoted.items()]


def dry_run(config: str | Path, overrides: Sequence[str] = (), *, executor: str = "auto") -> str:
    """Return what :func:`submit` would send: the sbatch script or local command, and the resolved config."""
    chosen = choose_executor(executor)
    loaded = configs.load_config(config, overrides)
    _validate(loaded, chosen, Path.cwd())
    refuse_unfit(rundir.runs_root())
    run = RunDir(rundir.runs_root() / loaded.name / "RUN_ID")
    ranks = loaded.cluster.tasks_per_node
    script = f"# executor local: no sbatch script; a supervisor and {ranks} rank(s) on this machine"
    if chosen == "slurm":
        script = sbatch_script(loaded, run)
    return f"{script.rstrip()}\n\n# --- config.yaml (resolved)\n{configs.dump_config(loaded)}"


def sbatch_script(config: JobConfig, run: RunDir) -> str:
    """Return the text that submitit hands to sbatch, made by submitit itself."""
    from submitit.slurm.slurm import _make_sbatch_string

    command = f"{_exec_python()} -u -m submitit.core._submit {shlex.quote(str(run.submitit))}"
    return str(_make_sbatch_string(command=command, folder=run.submitit, **slurm_parameters(config, run, "TOKEN")))


@contextmanager
def _only_these(environ: Mapping[str, str]) -> Iterator[None]:
    """Make ``os.environ`` equal to ``environ`` for a moment: submitit starts its programs with it."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _ignoring_the_terminal() -> Iterator[None]:
    """Have children started now ignore Ctrl-C and the end of the terminal. submitit's controller would kill the
    supervisor one second after Ctrl-C, with everything unsaved. The waiting caller handles both, and tells the
    supervisor."""
    if threading.current_thread() is not threading.main_thread():  # handlers can be set only there
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _output_to(path: Path) -> Iterator[None]:
    """Have children started now write to ``path`` and read nothing. A child that kept the caller's pipe open until the
    run's end would make ``$(toolkit submit ...)`` wait for it."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    # The descriptors themselves are replaced, since children inherit those and not sys.stdout.
    saved: dict[int, int] = {}
    for number in (0, 1, 2):
        with suppress(OSError):  # a daemon may have closed them
            saved[number] = os.dup(number)
    try:
        with Path(os.devnull).open("rb") as nothing, os.fdopen(fsio.open_private(path, _APPEND), "ab") as file:
            for source, number in ((nothing, 0), (file, 1), (file, 2)):
                os.dup2(source.fileno(), number)
        yield
    finally:
        for number in (0, 1, 2):
            os.close(number)
            if number in saved:
                os.dup2(saved[number], number)
                os.close(saved[number])


_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND


@contextmanager
def _fewer_words() -> Iterator[None]:
    """Silence submitit's info lines, which are not for our users. It pickles by reference what it can import."""
    import logging

    logger = logging.getLogger("submitit")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def _is_process_of(run: RunDir, pid: int | str) -> bool:
    """True if the process runs and is one that submitit started for this run: pids are reused.

    A process that has just been started may have no command line for some milliseconds. A zombie, which only waits for
    its parent to reap it, has no command line either, and no program.
    """
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return os.fsencode(run.submitit) in command if command else bool(Path(f"/proc/{pid}/exe").readlink())
    except OSError:
        return False
