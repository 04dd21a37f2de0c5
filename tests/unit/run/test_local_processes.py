"""The processes of a run without Slurm: which one a file means, and what is done where that cannot be seen."""

import os
import subprocess
import sys
import time
from dataclasses import asdict
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from toolkit import config as configs
from toolkit.base.errors import EXIT_REQUEST, RequestError
from toolkit.base.procfs import ProcessIdentity
from toolkit.cli.main import main
from toolkit.config import JobConfig
from toolkit.files import rundir
from toolkit.files.run_files import OwnerRecord, RunResult, RunState, RunStatus
from toolkit.files.rundir import RunDir
from toolkit.plugins.testing.fake_slurm import FakeSlurm
from toolkit.run.rank import main as rank
from toolkit.run.records import ownership, user_requests
from toolkit.run.records.user_requests import Intent
from toolkit.run.submission import handle
from toolkit.run.submission.handle import attach
from toolkit.run.submission.resume_run import resume
from toolkit.slurm import commands

PLACE = ProcessIdentity.of(os.getpid()).birth.rpartition(":")[0]
BOOT = PLACE.partition(":")[0]


def make_run(root: Path, **status: object) -> RunDir:
    run = rundir.create("test", root)
    run.config.write_text("job: jobs.classify\n")
    run.write_status(RunStatus.from_json(dict(status)))
    return run


def owned_by(run: RunDir, pid: int, **changes: Any) -> OwnerRecord:
    """Make a process the supervisor of a local run."""
    record = OwnerRecord(run.last_owner_number() + 1, "token", "local", "", pid, time.time(), serves=True)
    record = record.replace(**{**asdict(ProcessIdentity.of(pid)), **changes})
    assert run.claim_owner_number(record.number)
    run.write_owner(record)
    return record


def test_a_local_run_is_over_when_both_its_processes_have_ended(tmp_path: Path) -> None:
    run = make_run(tmp_path, state="queued")
    with subprocess.Popen(["sleep", "60"]) as starter, subprocess.Popen(["sleep", "60"]) as supervisor:
        owner = owned_by(run, supervisor.pid)
        ownership.note_jobs(run, owner, str(starter.pid))
        for process in (supervisor, starter):
            assert not attach(run).is_over()
            process.kill()
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie now
        assert attach(run).is_over()


def spellings(path: Path) -> list[Path]:
    """Return the path of a run, and others that lead to it."""
    link = path.parent.parent.with_name("link")
    link.symlink_to(path.parent.parent)
    return [path, link / path.parent.name / path.name, path.parent.parent / "x/../test" / path.name]


UNSEEN = [
    pytest.param({"host": "another", "birth": "boot-of-another:1:2"}, id="another machine"),
    pytest.param({"birth": "this-machine-before:1:2"}, id="another machine of this name"),
    pytest.param({"host": "another", "birth": f"{BOOT}:1:2"}, id="another container of this machine"),
    pytest.param({"host": "another", "birth": ""}, id="another machine, by its name alone"),
]


def test_nobody_says_that_a_process_is_gone_which_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOOLKIT_RUNS", str(tmp_path))
    run = make_run(tmp_path, state="running")
    owned_by(run, os.getpid())
    assert main(["cancel", run.id, "--gone"]) == EXIT_REQUEST
    assert "has a job or process that can be asked" in capsys.readouterr().err
    assert run.result() is None


def test_a_supervisor_that_ends_while_it_is_asked_to_stop_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def has_ended(pid: int, number: int) -> None:
        raise ProcessLookupError

    run = make_run(tmp_path, state="running")
    owned_by(run, os.getpid())
    monkeypatch.setattr(os, "kill", has_ended)
    attach(run).stop()
    assert user_requests.read_intent(run) is Intent.STOP


@pytest.mark.parametrize("birth", ["another-boot:1:2", f"{PLACE}:2"])
def test_a_process_that_got_the_pid_of_a_dead_supervisor_is_left_alone(tmp_path: Path, birth: str) -> None:
    """Also after the machine's new start, and under another name: it is this machine's boot that counts."""
    run = make_run(tmp_path, state="running")
    with subprocess.Popen(["sleep", "600"]) as stranger:
        try:
            host = {"host": "former-name"} if birth.startswith(PLACE) else {}
            owned_by(run, stranger.pid, birth=birth, time=1.0, **host)
            attach(run).cancel()
            assert stranger.poll() is None
        finally:
            stranger.kill()
    assert attach(run).wait(5)["state"] == "cancelled"


def begin(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> int:
    """Make this process rank 0 of a run, without a supervisor. Return its number."""
    monkeypatch.setenv(rundir.RUN_DIR_VARIABLE, str(run.path))
    monkeypatch.setenv(rundir.OWNER_VARIABLE, "")
    rank._open_run(JobConfig())
    return int(os.environ[rundir.OWNER_VARIABLE])


def test_a_rank_alone_begins_no_run_that_another_process_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = FakeSlurm()
    for module in (handle, commands):
        monkeypatch.setattr(module, "Slurm", lambda: slurm)
    run = make_run(tmp_path, state="running")
    with subprocess.Popen(["sleep", "60"]) as process:
        for serves in (
            {"executor": "local"},
            {"executor": "local", "host": "another", "birth": "boot-of-another:1:2"},
            {"executor": "slurm", "jobs": (slurm.sbatch(["job.sh"]),)},
            {"executor": "slurm", "serves": False},  # it is being submitted
            {"executor": "debug"},  # another rank alone
        ):
            before = owned_by(run, process.pid, **serves)
            with pytest.raises(RequestError, match=r"two would write its files|being submitted"):
                begin(run, monkeypatch)
            assert run.last_owner_number() == before.number
            with pytest.raises(RequestError, match=r"Ctrl-C|toolkit cancel|being submitted"):
                resume(run)
        with pytest.raises(RequestError, match=f"its rank 0 is process {process.pid} here"):
            attach(run).cancel()
        process.kill()
    assert begin(run, monkeypatch) == before.number + 1


def test_a_rank_alone_has_no_result_of_before_once_it_is_the_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, state="completed")
    run.write_result(RunResult(RunState.COMPLETED, 1, metrics={}))
    write, seen = RunDir.write_owner, list[object]()

    def write_owner(self: RunDir, owner: OwnerRecord) -> None:
        seen.append(self.result())
        write(self, owner)

    monkeypatch.setattr(RunDir, "write_owner", write_owner)
    begin(run, monkeypatch)
    assert seen == [None]


def test_a_step_of_a_requeued_job_goes_on_with_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """submitit and others requeue a job themselves. Before, each start began a new run at step 0."""
    monkeypatch.setenv("TOOLKIT_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(rundir.OWNER_VARIABLE, "")
    monkeypatch.setenv("SLURM_JOB_ID", "7")

    def begun(step: str, restarts: str, task: int = os.getpid(), **changes: Any) -> str:
        monkeypatch.setenv(rundir.RUN_DIR_VARIABLE, "")
        monkeypatch.setenv("SLURM_TASK_PID", str(task))
        monkeypatch.setenv("SLURM_STEP_ID", step)
        monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
        rank._open_run(JobConfig(**changes))
        return os.environ[rundir.RUN_DIR_VARIABLE]

    first, other = begun("0", "0"), begun("1", "0")
    assert first != other
    assert (begun("0", "1"), begun("1", "2")) == (first, other)
    # Another command, which has the number of a step that was left out, and one of several in a shell.
    for another in (begun("1", "3", argv=["--seed=2"]), begun("1", "3", task=os.getppid())):
        assert another not in (first, other)
    RunDir(Path(first)).write_result(RunResult(RunState.COMPLETED, 1, metrics={}))
    assert begun("0", "4") not in (first, other)


@pytest.mark.parametrize(
    ("executor", "job", "name"),
    [
        ("slurm", "dino vit/small", "dino-vit-small"),
        ("slurm", "submitit", "test_local_processes"),  # submitit's default
        ("local", "the shell's", "test_local_processes"),
    ],
)
def test_a_run_within_a_job_of_submitits_has_its_name(
    executor: str, job: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["/lib/submitit/core/_submit.py", "folder"])
    monkeypatch.setenv("SLURM_JOB_NAME", job)
    assert rank._name_by_submitit() is None
    monkeypatch.setenv("SUBMITIT_EXECUTOR", executor)
    assert rank._name_by_submitit() == name


@pytest.mark.parametrize(
    ("program", "module", "job"),
    [
        ("train.py", None, "train.py"),
        ("package/train.py", "package.train", "package.train"),
        ("driver.py", None, configs.CALLED_JOB),
        ("-c", None, configs.CALLED_JOB),
        ("bin/train", None, configs.CALLED_JOB),
        ("lib/ipykernel_launcher.py", "ipykernel_launcher", configs.CALLED_JOB),
    ],
)
def test_only_a_program_that_starts_the_run_itself_is_started_again(
    program: str, module: str | None, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, the example that comes with the toolkit was started for a run of `python -c`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "package").mkdir()
    for name in ("train.py", "package/train.py", "package/__init__.py"):
        (tmp_path / name).write_text("import toolkit\nrun = toolkit.start()\n")
    (tmp_path / "driver.py").write_text("import train\n")
    monkeypatch.setattr("sys.argv", [program])
    spec = None if module is None else ModuleSpec(module, None)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)
    assert rank._program() == job


def test_a_rank_alone_takes_its_run_over_from_one_on_another_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher may start its ranks again elsewhere. The first one writes no more."""
    run = make_run(tmp_path, state="running")
    earlier = owned_by(run, os.getpid(), executor="debug", host="another", birth="boot-of-another:1:2")
    assert begin(run, monkeypatch) == earlier.number + 1
    assert not run.belongs_to(earlier.number)
    with pytest.raises(RequestError, match=r"TOOLKIT_RUN_DIR=.* no such folder"):
        begin(RunDir(tmp_path / "nothing"), monkeypatch)


@pytest.mark.parametrize("state", ["stopped", "failed"])
def test_a_rank_alone_on_another_node_has_ended_when_its_status_says_so(tmp_path: Path, state: str) -> None:
    """Before, `toolkit resume`, which `why` advised, was refused on the login node after an `srun toolkit run`."""
    run = make_run(tmp_path, state=state, updated=time.time() - 60)
    owner = owned_by(run, os.getpid(), executor="debug", host="another", birth="boot-of-another:1:2")
    assert not attach(run).is_over()  # the status is that of an earlier start
    run.write_status(run.status().replace(state=RunState.RUNNING, updated=owner.time + 1))
    assert not attach(run).is_over()
    run.write_status(run.status().replace(state=RunState(state)))
    assert attach(run).is_over()


def test_a_run_of_this_process_is_over_when_its_handle_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The executor debug makes the process that submits the run its rank."""
    run = make_run(tmp_path, state="queued")
    sent = ownership.submit_as(run, "debug", ownership.take(run, 0))
    assert begin(run, monkeypatch) == sent.number + 1
    assert (run.owner().token, attach(run).is_over()) == (sent.token, True)
