"""The sbatch script, word for word, and what cannot get into it."""

import errno
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from submitit.core.utils import JobPaths

from tests.process_limits import ChangeLimits
from toolkit.base.errors import EXIT_FAILED, EXIT_REQUEST, JobFailedError, RequestError, SlurmError
from toolkit.cli.main import main
from toolkit.config import JobConfig
from toolkit.files import rundir
from toolkit.files.run_files import RunResult, RunState, RunStatus
from toolkit.files.rundir import RunDir
from toolkit.plugins.testing.fake_slurm import FakeSlurm
from toolkit.run.prepare import snapshot
from toolkit.run.submission import executors, handle, resume_run, submit
from toolkit.run.submission.executors import sbatch_script, srun_options
from toolkit.run.submission.handle import Run, attach
from toolkit.run.submission.resume_run import resume
from toolkit.slurm import commands

GOLDEN = """\
#!/bin/bash

# Parameters
#SBATCH --account=acc
#SBATCH --comment='it'"'"'s "quoted"; $(rm -rf /)'
#SBATCH --constraint='a100&ib'
#SBATCH --cpus-per-task=6
#SBATCH --exclude='node[3,7]'
#SBATCH --exclusive
#SBATCH --gpus-per-node=a100:4
#SBATCH --job-name=train
#SBATCH --mem=1536M
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --open-mode=append
#SBATCH --output='/r u n/submitit/%j_0_log.out'
#SBATCH --partition=gpu
#SBATCH --qos=high
#SBATCH --requeue
#SBATCH --segment=2
#SBATCH --signal=B:USR2@90
#SBATCH --time=60

# setup
trap '' HUP INT TERM USR1 USR2
umask 027
module load cuda
export PYTHONPATH='/r u n/.code/now'"${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONSAFEPATH=1
export TOOLKIT_RUNS=/
export TOOLKIT_UMASK=$(umask)
export TOOLKIT_SUBMISSION=TOKEN
umask 077

# command
export SUBMITIT_EXECUTOR=slurm
exec {python} -u -m submitit.core._submit '/r u n/submitit'
"""


def full_config() -> JobConfig:
    config = JobConfig(name="train")
    cluster = config.cluster
    cluster.nodes, cluster.tasks_per_node, cluster.cpus_per_task, cluster.time_min = 2, 4, 6, 60
    cluster.gpus_per_node, cluster.gpu_type, cluster.mem_gb = 4, "a100", 1.5
    cluster.partition, cluster.account, cluster.qos = "gpu", "acc", "high"
    cluster.constraint, cluster.exclude, cluster.exclusive = "a100&ib", "node[3,7]", True
    cluster.save_before_limit_s, cluster.setup, cluster.segment = 90, ["module load cuda"], 2
    cluster.extra = {"comment": 'it\'s "quoted"; $(rm -rf /)', "requeue": True, "no_kill": False}
    return config


def test_every_cluster_key_reaches_the_sbatch_script() -> None:
    run = RunDir(Path("/r u n"))
    os.umask(0o027)
    assert sbatch_script(full_config(), run) == GOLDEN.replace("{python}", shlex.quote(sys.executable))


def test_each_component_has_its_block_of_options() -> None:
    config = full_config()
    config.cluster.spare_nodes = 1
    config.cluster.components = [
        {"nodes": 1},
        {"nodes": 3, "tasks_per_node": 2, "gpus_per_node": 2, "gpu_type": None, "partition": "old", "mem_gb": 8.0},
    ]
    assert config.cluster.ranks == 1 * 4 + 3 * 2
    script = sbatch_script(config, RunDir(Path("/r")))
    options, _, rest = script.partition("\n\n# setup")
    first, second = options.split("#SBATCH hetjob\n")
    assert {"#SBATCH --nodes=1", "#SBATCH --partition=gpu", "#SBATCH --gpus-per-node=a100:4"} <= {*first.splitlines()}
    assert "no-kill" not in first
    assert sorted(line.removeprefix("#SBATCH ") for line in second.splitlines()) == [
        "--account=acc",
        """--comment='it'"'"'s "quoted"; $(rm -rf /)'""",
        "--constraint='a100&ib'",
        "--cpus-per-task=6",
        "--exclude='node[3,7]'",
        "--exclusive",
        "--gpus-per-node=2",
        "--mem=8192M",
        "--no-kill",
        "--nodes=4",
        "--ntasks-per-node=2",
        "--partition=old",
        "--qos=high",
        "--segment=2",
        "--time=60",
    ]
    assert "#SBATCH" not in rest


def test_what_no_key_can_say_is_passed_on_in_sbatchs_words() -> None:
    config = JobConfig()
    config.cluster.gpus_per_node, config.cluster.nodes, config.cluster.mem_gb = 3, 2, 0
    config.cluster.extra = {"gres": "gpu:a:1,gpu:b:2,nvme", "exclusive": "user", "nodes": "2-4"}
    config.cluster.check()
    script = sbatch_script(config, RunDir(Path("/run")))
    asked = {"--gres=gpu:a:1,gpu:b:2,nvme", "--exclusive=user", "--nodes=2-4", "--mem=0M"}
    assert asked <= {line.removeprefix("#SBATCH ") for line in script.splitlines()}
    assert "gpus-per-node" not in script
    assert script.count("--nodes=") == 1
    assert "--gres=gpu:a:1,gpu:b:2,nvme" in srun_options(config)


def test_a_default_config_asks_for_nothing_it_was_not_told() -> None:
    text = sbatch_script(JobConfig(), RunDir(Path("/run")))
    for word in ("partition", "account", "gpus", "mem", "wckey", "exclusive", "srun"):
        assert word not in text


def test_bash_sees_the_snapshot_first(tmp_path: Path) -> None:
    """The oracle is bash: what does the script export?"""
    run = RunDir(tmp_path / "it's a run/x/y")
    lines = sbatch_script(JobConfig(), run).split("# setup\n")[1].split("# command")[0]
    done = subprocess.run(
        ["bash", "-c", lines + 'printf "%s\\n%s\\n" "$PYTHONPATH" "$PYTHONSAFEPATH"'],
        env={"PYTHONPATH": "/mine"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{run.code}:/mine\n1\n"


def test_an_unknown_executor_is_refused() -> None:
    with pytest.raises(RequestError, match="auto, slurm, local, debug"):
        executors.choose_executor("slrum")


def test_a_login_node_does_not_train_while_the_controller_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_on_path(tmp_path / "bin", monkeypatch, sbatch="", scontrol="echo 'Slurmctld(primary) at head is DOWN'")
    with pytest.raises(RequestError, match=r"controller does not answer .*--executor slurm, or --executor local"):
        executors.choose_executor("auto")
    assert executors.choose_executor("local") == "local"


def test_a_submission_onto_a_disk_that_is_nearly_full_warns(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put_on_path(project / "bin", monkeypatch, sbatch="echo 7", srun="")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100 << 10))
    assert main(["submit", "own.yaml", "--executor", "slurm"]) == 0
    assert "has 100 KiB left" in capsys.readouterr().err


def test_a_refused_config_leaves_no_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLKIT_RUNS", str(tmp_path / "runs"))
    config = tmp_path / "c.yaml"
    config.write_text("checkpoint: {keep: 1}\n")
    with pytest.raises(RequestError):
        submit.submit(config, executor="local")
    assert not (tmp_path / "runs").exists()


def test_environment_comes_back_after_submitting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CPU_BIND", "mask")
    before = dict(os.environ)
    with executors._only_these({"A": "1"}):
        assert dict(os.environ) == {"A": "1"}
    assert dict(os.environ) == before


def make_run(tmp_path: Path, **status: object) -> Run:
    run = rundir.create("test", tmp_path)
    run.write_status(RunStatus.from_json(dict(status)))
    return Run(run, "local", "1")


def test_waiting_ends_when_the_result_is_there(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.dir.write_result(RunResult.from_json({"state": "completed", "metrics": {}}))
    assert run.wait()["state"] == "completed"
    assert run.result()["state"] == "completed"


def test_the_result_of_a_failed_run_is_an_error_with_its_cause(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.dir.write_result(RunResult.from_json({"state": "failed", "why": "rank 1 on node1: ValueError: boom"}))
    with pytest.raises(Exception, match="rank 1 on node1: ValueError: boom"):
        run.result()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter a project of its own with one job and one config. Its runs lie beside it."""
    folder = tmp_path / "my project"
    (folder / "ownjobs").mkdir(parents=True)
    (folder / "ownjobs/__init__.py").touch()
    (folder / "ownjobs/job.py").write_text("def main(config): print(config)\n")
    (folder / "own.yaml").write_text("job: ownjobs.job\n")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TOOLKIT_RUNS", str(tmp_path / "runs"))
    return folder


def put_on_path(folder: Path, monkeypatch: pytest.MonkeyPatch, **programs: str) -> None:
    folder.mkdir()
    for name, script in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_what_sbatch_refuses_is_said_once_in_its_words_and_leaves_no_run(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refusal = "echo 'invalid partition specified: gpus' >&2; exit 1"
    put_on_path(tmp_path / "bin", monkeypatch, sbatch=refusal, sinfo="echo cpu; echo gpu", srun="")
    assert main(["submit", "own.yaml", "--executor", "slurm"]) == EXIT_REQUEST
    error = capsys.readouterr().err
    assert error.count("invalid partition specified: gpus") == 1
    assert "What to do: did you mean 'gpu'? cluster.partition is one of cpu, gpu\n" in error
    assert not rundir.all_runs()
    assert not (tmp_path / "runs/own").exists()


def test_a_controller_that_does_not_answer_has_refused_nothing(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)"
    put_on_path(tmp_path / "bin", monkeypatch, sbatch=f"echo '{words}' >&2; exit 1", srun="")
    assert main(["submit", "own.yaml", "--executor", "slurm"]) == EXIT_FAILED


#: What sbatch prints although the controller has taken job 7, and its exit code.
UNCLEAR = {
    "a banner with another number": ("welcome; your last job 40 has ended\n7\n", "", 0),
    "no utf-8": ("\\377\\376 \\261\n", "", 0),
    "nothing": ("", "", 0),
    "two numbers": ("40\n7\n", "", 0),
    "a lost answer": ("", "Batch job submission failed: Socket timed out on send/recv operation", 1),
    "an answer cut off": ("", "Batch job submission failed: Zero Bytes were transmitted or received", 1),
}


@pytest.mark.parametrize("said", UNCLEAR.values(), ids=UNCLEAR)
def test_a_job_that_sbatch_does_not_name_is_found_by_its_script(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: tuple[str, str, int]
) -> None:
    out, err, code = said
    sbatch = (
        f"for script; do :; done; echo \"7|$script\" >{tmp_path}/queue; printf '{out}'; echo '{err}' >&2; exit {code}"
    )
    squeue = f"echo a banner with job 40; echo '6|/elsewhere/job.sh'; cat {tmp_path}/queue"
    put_on_path(tmp_path / "bin", monkeypatch, sbatch=sbatch, squeue=squeue, srun="")
    assert submit.submit("own.yaml", executor="slurm").job_id == "7"


@pytest.mark.parametrize("squeue", ["exit 1", "echo garbage", r"printf '\377\376'", "true"])
def test_a_run_that_slurm_may_have_is_kept_and_can_be_submitted_again(
    project: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change_limits: ChangeLimits,
    capsys: pytest.CaptureFixture[str],
    squeue: str,
) -> None:
    change_limits(queued_within_s=0.0)
    put_on_path(tmp_path / "bin", monkeypatch, sbatch="echo Socket timed out >&2; exit 1", squeue=squeue, srun="")
    assert main(["submit", "own.yaml", "--executor", "slurm"]) == EXIT_FAILED
    (run,) = rundir.all_runs()
    error = capsys.readouterr().err
    assert "it is not known whether Slurm accepted the job" in error
    assert "nothing was submitted" not in error
    assert str(run.submitit) in error
    assert f"`toolkit resume {run.id}`" in error
    up = "echo Slurmctld is UP"
    put_on_path(tmp_path / "later", monkeypatch, sbatch="echo 8", srun="", squeue=squeue, scontrol=up)
    assert main(["resume", run.id]) == 0
    assert run.submission().job_id == "8"


def test_a_job_that_the_partition_can_never_run_is_queued_with_a_warning(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = "echo 'JobId=7 JobName=own'; echo '   JobState=PENDING Reason=PartitionConfig Dependency=(null)'"
    put_on_path(tmp_path / "bin", monkeypatch, sbatch="echo Submitted batch job 7", scontrol=shown, srun="")
    assert main(["submit", "own.yaml", "--executor", "slurm"]) == 0
    (run,) = rundir.all_runs()
    error = capsys.readouterr().err
    assert "toolkit: warning: job 7 is queued and may never start: asks for more than its partition has" in error
    assert f"`toolkit cancel {run.id}`" in error


@pytest.mark.parametrize(
    ("overrides", "name", "expected"),
    [([], None, "train"), (["name=mine"], None, "mine"), (["name=mine"], "option", "option")],
)
def test_a_script_run_has_the_name_it_was_given(
    project: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], name: str | None, expected: str
) -> None:
    monkeypatch.setattr(executors, "send", lambda run, config, executor, owner, **_: Run(run, executor, "1"))
    Path("train.py").touch()
    run = submit.submit_command(["python", "train.py"], overrides, name=name, executor="local")
    assert run.dir.name == expected


def test_a_resume_that_sbatch_refuses_leaves_the_run_as_it_was(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_on_path(tmp_path / "bin", monkeypatch, sbatch="exit 1", srun="")
    run = make_run(tmp_path, state="failed").dir
    run.config.write_text("job: ownjobs.job\n")
    run.write_result(RunResult.from_json({"state": "failed", "why": "boom"}))
    with pytest.raises(SlurmError):
        resume(run, executor="slurm")
    assert run.result() == RunResult(RunState.FAILED, why="boom")
    assert run.status() == RunStatus(state=RunState.FAILED)


def test_a_job_whose_sources_would_not_be_copied_is_refused(project: Path, tmp_path: Path) -> None:
    """An editable install may provide it. Edits of the checkout would then reach the waiting job."""
    with pytest.raises(RequestError, match=r"jobs.classify is .*classify.py, and the sources that a run copies are"):
        submit.dry_run("own.yaml", ["job=jobs.classify", "data.name=digits"], executor="local")


EDITABLE = """
import sys
from importlib.machinery import PathFinder
from toolkit.run.rank import main

class Finder:  # as an editable installation of a flat layout has it
    @staticmethod
    def find_spec(name, path=None, target=None):
        return PathFinder.find_spec(name, [{live!r}]) if name == "flat" else None

sys.path.append({live!r} + "/src")
sys.meta_path.append(Finder)
main._import_from_copy()
import flat, mine
print(flat.__file__, mine.__file__, sep="\\n")
"""


def test_a_loop_imports_the_copy_of_a_package_that_is_installed_as_editable(tmp_path: Path) -> None:
    live = tmp_path / "project"
    for file in ("src/mine/__init__.py", "flat/__init__.py", "train.py"):
        (live / file).parent.mkdir(parents=True, exist_ok=True)
        (live / file).touch()
    run = RunDir(tmp_path / "runs/a/1")
    run.path.mkdir(parents=True)
    snapshot.take_if_missing(live, run.path)
    (live / "src/mine/__init__.py").write_text("raise SystemExit('edited since')")
    environ = {**os.environ, rundir.RUN_DIR_VARIABLE: str(run.path)}
    code = EDITABLE.format(live=str(live))
    told = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    files = [run.code / "flat/__init__.py", run.code / "src/mine/__init__.py"]
    assert told.stdout.split() == [str(file) for file in files]


def test_a_plain_script_can_be_tried_without_being_sent(project: Path) -> None:
    (project / "plain.py").write_text("print(1)\n")
    assert "name: plain\n" in submit.dry_run("plain.py", executor="local")
    shown = submit.dry_run("plain.py", ["cluster.setup=[ulimit -n 4096]"], executor="local")
    assert shown.startswith(
        "# executor local: no sbatch script; cluster.setup, then a supervisor and 1 rank(s) on this"
    )


def test_a_job_may_lie_in_a_package_that_is_linked_into_the_project(project: Path, tmp_path: Path) -> None:
    (tmp_path / "lab").mkdir()
    for name in ("__init__.py", "job.py"):
        (project / "ownjobs" / name).rename(tmp_path / "lab" / name)
    (project / "ownjobs").rmdir()
    (project / "ownjobs").symlink_to(tmp_path / "lab")
    submit.dry_run("own.yaml", executor="local")


def test_the_project_may_be_another_folder_than_the_current_one(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    put_on_path(tmp_path / "bin", monkeypatch, sbatch="echo Submitted batch job 7", srun="")
    run = submit.submit(project / "own.yaml", executor="slurm", project=project)
    assert run.job_id == "7"
    assert (run.dir.code / "ownjobs/job.py").is_file()


EXPEDITES = """
case "$*" in
    "show config") echo "SlurmctldParameters = enable_expedited_requeue"; echo "SLURM_VERSION = 25.11.7";;
    *) echo "Invalid job id specified" >&2; exit 1;;
esac"""
SBATCH = """
case "$1" in
    --help) echo "      --requeue[=expedite]   if set, permit the job to be requeued";;
    *) cat "$2" >>{sent}; echo Submitted batch job 7;;
esac"""


@pytest.mark.parametrize(
    ("extra", "asked"),
    [("{}", ["--requeue=expedite"]), ("{no-requeue: true}", ["--no-requeue"]), ("{requeue: true}", ["--requeue"])],
)
def test_where_slurm_expedites_requeues_it_is_asked_to(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: str, asked: list[str]
) -> None:
    sent = tmp_path / "sent.sh"
    put_on_path(tmp_path / "bin", monkeypatch, sbatch=SBATCH.format(sent=sent), scontrol=EXPEDITES, srun="")
    submit.submit("own.yaml", [f"cluster.extra={extra}"], executor="slurm")
    options = [line.partition(" ")[2] for line in sent.read_text().splitlines() if "requeue" in line]
    assert options == asked


def test_a_job_that_submitit_cannot_note_is_taken_back(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full after sbatch took the job. The job would wait in the queue without a known run."""
    usual = JobPaths.move_temporary_file

    def full(self: JobPaths, tmp_path: Path | str, name: str, keep_as_symlink: bool = False) -> None:
        if name == "submitted_pickle":
            raise OSError(errno.ENOSPC, "No space left on device")
        usual(self, tmp_path, name, keep_as_symlink)

    monkeypatch.setattr(JobPaths, "move_temporary_file", full)
    sbatch, cancelled = "echo Submitted batch job 7", tmp_path / "cancelled"
    put_on_path(tmp_path / "bin", monkeypatch, sbatch=sbatch, scancel=f'echo "$*" >>{cancelled}', srun="")
    with pytest.raises(OSError, match="No space left on device"):
        submit.submit("own.yaml", executor="slurm")
    assert cancelled.read_text().split()[-1] == "7"
    assert not list((tmp_path / "runs").glob("own/*"))


def over(monkeypatch: pytest.MonkeyPatch, change_limits: ChangeLimits, *, is_over: bool = True) -> None:
    monkeypatch.setattr(Run, "is_over", lambda *_, **__: is_over)
    change_limits(read_files_every_s=0.0, ask_slurm_every_s=0.0)


def test_a_job_that_is_over_gets_time_for_its_last_file_to_arrive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change_limits: ChangeLimits
) -> None:
    """NFS on the login node remembers a missing result for up to a minute."""
    over(monkeypatch, change_limits)
    run = Run(make_run(tmp_path, state="running").dir, "slurm", "7")
    watching = run.watch()
    assert [next(watching)["state"] for _ in range(3)] == ["running"] * 3
    run.dir.write_result(RunResult.from_json({"state": "completed"}))
    assert list(watching) == []


def test_slurm_is_asked_only_while_the_status_says_nothing_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change_limits: ChangeLimits
) -> None:
    """Before, a thousand people with `--follow` asked the controller 33 times a second."""
    asked, now, status = list[float](), 1000.0, {"state": "queued", "updated": 0.0}
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(Run, "is_over", lambda *_: asked.append(now))
    monkeypatch.setattr(RunDir, "status", lambda _: dict(status))
    change_limits(read_files_every_s=0.0)
    watching = Run(make_run(tmp_path, state="queued").dir, "slurm", "7").statuses()

    def look(for_s: int, *, speaking: bool) -> int:
        nonlocal now
        before = len(asked)
        for _ in range(for_s):
            status["updated"] = now if speaking else status["updated"]
            next(watching)
            now += 1.0
        return len(asked) - before

    assert look(120, speaking=False) == 3  # in the queue
    assert look(3600, speaking=True) == 0  # it runs
    assert look(62, speaking=False) == 2  # its supervisor is dead


@pytest.mark.parametrize("is_there", [True, False])
def test_a_job_that_is_over_without_a_result_or_a_folder_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change_limits: ChangeLimits, is_there: bool
) -> None:
    over(monkeypatch, change_limits)
    change_limits(files_lag_s=0.0)
    run = Run(make_run(tmp_path, state="running").dir, "slurm", "7")
    if not is_there:
        shutil.rmtree(run.dir.path)
    says = f"wrote no result.*toolkit resume {run.id}" if is_there else "its folder .* is gone"
    with pytest.raises(JobFailedError, match=says):
        run.wait(5)


def test_a_lost_run_can_be_resumed(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change_limits: ChangeLimits
) -> None:
    """Its supervisor was killed and wrote no result: the status says running for ever."""
    over(monkeypatch, change_limits)
    put_on_path(tmp_path / "bin", monkeypatch, sbatch="echo Submitted batch job 8", srun="")
    run = make_run(tmp_path, state="running", job_id="7").dir
    run.config.write_text("job: ownjobs.job\n")
    assert resume(run, executor="slurm").job_id == "8"


@pytest.mark.parametrize("state", ["queued", "requeued"])
def test_a_job_cancelled_in_the_queue_gets_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    slurm = FakeSlurm()
    for module in (handle, commands):
        monkeypatch.setattr(module, "Slurm", lambda: slurm)
    run = Run(make_run(tmp_path, state=state).dir, "slurm", slurm.sbatch(["job.sh"]))
    run.cancel()
    assert run.wait(5)["state"] == "cancelled"


def test_a_run_without_a_job_is_not_cancelled_by_guess(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="without a supervisor"):
        attach(make_run(tmp_path, state="running", job_id=None).dir)


def test_doctor_asks_for_the_nodes_that_the_job_would_get() -> None:
    config = full_config()
    config.cluster.extra = {"reservation": "maintenance", "mail-type": "FAIL"}
    assert sorted(executors.srun_options(config)) == [
        "--account=acc",
        "--constraint=a100&ib",
        "--exclude=node[3,7]",
        "--exclusive",
        "--gpus-per-node=a100:4",
        "--job-name=doctor",
        "--partition=gpu",
        "--qos=high",
        "--reservation=maintenance",
        "--time=5",
    ]


def test_a_completed_run_goes_on_where_its_limit_of_steps_is_taken_away(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resume_run, "check_submittable", lambda *_, **__: None)
    then, now = JobConfig(), JobConfig()
    then.train.max_steps = 10
    result = RunResult(RunState.COMPLETED, attempts=1, step=10, metrics={})
    resume_run._check_change(run, then, now, result, "local")
