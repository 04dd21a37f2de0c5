"""A batch script that starts the toolkit itself.

The run that its job serves, and the process that the script becomes.
"""

import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from toolkit import config as configs
from toolkit.base import fsio
from toolkit.base.errors import EXIT_DONE, EXIT_REQUEST, ConfigError, RequestError
from toolkit.cli import main as cli
from toolkit.config import JobConfig
from toolkit.files import rundir
from toolkit.files.run_files import RunResult, RunState
from toolkit.files.rundir import RunDir
from toolkit.nodes.allocation import Allocation
from toolkit.plugins.testing.fake_slurm import FakeSlurm
from toolkit.run.prepare import new_run as prepare
from toolkit.run.records import ownership
from toolkit.run.records.ownership import Claim
from toolkit.run.requeue.follow_up import PREDECESSORS_VARIABLE, RUN_VARIABLE
from toolkit.run.submission import inside_allocation
from toolkit.run.supervise import entry

JOB = {
    "SLURM_JOB_ID": "41",
    "SLURM_CLUSTER_NAME": "box",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURMD_NODENAME": "node1",
}


class Became(Exception):
    """os.execv was called: this process has become another program."""

    def __init__(self, path: str, argv: list[str]) -> None:
        self.path, self.argv, self.environ = path, argv, dict(os.environ)


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Enter a project of two files, with the environment of a job's first start.

    ``os.execv`` raises :class:`Became` instead of leaving this process.
    """
    project = tmp_path / "my project"
    project.mkdir()
    (project / "mine.py").write_text("def main(config): print(config)\n")
    (project / "mine.yaml").write_text("name: mine\njob: mine\n")
    monkeypatch.chdir(project)
    # the code under test changes os.environ itself, which monkeypatch would not undo
    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith(("SLURM", "TOOLKIT_", "PYTHON"))]:
        del os.environ[name]
    os.environ.update({**JOB, "TOOLKIT_RUNS": str(tmp_path / "runs"), "TOOLKIT_SITE": str(tmp_path / "none.yaml")})
    (tmp_path / "none.yaml").write_text("{}")

    def execv(path: str, argv: list[str]) -> None:
        raise Became(path, argv)

    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setattr(entry, "supervise", lambda *args: pytest.fail("nothing is to be supervised yet"))
    yield project
    os.environ.clear()
    os.environ.update(before)


def enter(**variables: Any) -> Became:
    """Return what the batch script becomes with these variables, beside those of :data:`JOB`."""
    os.environ.update({name: str(value) for name, value in variables.items()})
    with pytest.raises(Became) as caught:
        inside_allocation.supervise("mine.yaml", ["optim.lr=0.25"])
    return caught.value


def served(became: Became) -> RunDir:
    return RunDir(Path(became.environ[RUN_VARIABLE]))


def earlier_run(job: str) -> RunDir:
    """Return a run that ``job`` served at its last start, by the same command."""
    config = JobConfig(name="mine", job="mine")
    run = prepare.new_run(config, Path.cwd())
    rundir.remember_job(run, job)
    rundir.remember_job(run, f"{job}-{inside_allocation.command_key()}")
    return run


def test_a_first_start_makes_a_run_from_the_sources_here_and_the_requested_config() -> None:
    run = served(enter())
    assert [run.path] == [found.path for found in rundir.all_runs()]
    assert (run.code / "mine.py").read_text() == "def main(config): print(config)\n"
    config = configs.load_config(run.config, site=False)
    assert (config.name, config.job, config.optim.lr) == ("mine", "mine", 0.25)


def test_the_supervisor_runs_from_the_copy_of_the_sources_and_not_from_the_checkout() -> None:
    became = enter(PYTHONPATH="/their/lib")
    run = served(became)
    assert (became.path, became.argv) == (
        sys.executable,
        [sys.executable, "-m", "toolkit", "supervise", str(run.config)],
    )
    assert became.environ["PYTHONPATH"].split(":") == [str(run.code), "/their/lib"]
    assert became.environ["PYTHONSAFEPATH"] == "1"
    assert became.environ["TOOLKIT_RUNS"] == str(run.path.parent.parent)


@pytest.mark.parametrize("state", [None, "failed", "stopped", "cancelled"])
def test_a_restarted_job_goes_on_with_its_run(state: str | None) -> None:
    run = earlier_run("box-41")
    if state is not None:
        run.write_result(RunResult.from_json({"state": state}))
    assert served(enter(SLURM_RESTART_COUNT=1)).path == run.path
    assert len(rundir.all_runs()) == 1


def test_a_job_that_is_restarted_after_its_run_was_completed_makes_no_second_one() -> None:
    run = earlier_run("box-41")
    run.write_result(RunResult.from_json({"state": "completed"}))
    assert served(enter(SLURM_RESTART_COUNT=1)).path == run.path
    assert len(rundir.all_runs()) == 1
    assert run.result() == RunResult(RunState.COMPLETED)


def test_a_restart_before_there_was_a_run_makes_one() -> None:
    assert served(enter(SLURM_RESTART_COUNT=1)).code.is_dir()


def test_a_new_job_with_the_number_of_an_old_one_does_not_get_its_run() -> None:
    """Job ids begin again with a fresh cluster. Only a restarted job has a run."""
    run = earlier_run("box-41")
    assert served(enter(SLURM_RESTART_COUNT=0)).path != run.path


def test_each_command_of_a_restarted_script_goes_on_with_its_own_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def command(seed: int, restarts: int) -> RunDir:
        monkeypatch.setattr(sys, "argv", ["toolkit", "supervise", "mine.yaml", f"train.seed={seed}"])
        run = served(enter(SLURM_RESTART_COUNT=restarts))
        rundir.remember_job(run, "box-41")  # as its supervisor does
        os.environ.pop(RUN_VARIABLE)
        return run

    first = command(1, 0)
    first.write_result(RunResult(RunState.COMPLETED))
    second = command(2, 0)  # the job is requeued meanwhile
    assert [command(1, 1).path, command(2, 1).path] == [first.path, second.path]
    second.write_result(RunResult(RunState.COMPLETED))
    third = command(3, 1)
    assert third.path not in (first.path, second.path)


def test_a_command_whose_words_change_with_each_start_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    run = earlier_run("box-41")
    monkeypatch.setattr(sys, "argv", ["toolkit", "exec", "--", "train.py", "--out=1795417311"])
    assert served(enter(SLURM_RESTART_COUNT=1)).path == run.path


def job_41(slurm: FakeSlurm) -> str:
    while (job := slurm.sbatch(["--requeue", "job.sh"])) != "41":
        pass
    slurm.start(job)
    return job


@pytest.mark.parametrize(
    ("end", "says"),
    [
        (lambda slurm, job: slurm.finish(job), "is over here (COMPLETED)"),
        (lambda slurm, job: slurm.cancel(job), "is over here"),
        (lambda slurm, job: slurm.requeue(job), "is over here"),
        (lambda slurm, job: [slurm.finish(job), slurm.forget(job)], "is not known to Slurm"),
    ],
)
def test_in_a_shell_whose_job_is_over_nothing_is_started(
    end: Callable[[FakeSlurm, str], object], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = FakeSlurm()
    monkeypatch.setattr(inside_allocation, "Slurm", lambda: slurm)
    job = job_41(slurm)
    assert served(enter()).path.is_dir()
    os.environ.pop(RUN_VARIABLE, None)
    end(slurm, job)
    slurm.advance(0)
    with pytest.raises(RequestError, match=re.escape(says)):
        inside_allocation.supervise("mine.yaml", [])
    assert len(rundir.all_runs()) == 1
    slurm.is_up = False  # which says nothing about the job
    enter()


STEP = {"SLURM_STEP_ID": 0, "SLURM_STEP_NUM_TASKS": 2, "SLURM_STEP_NUM_NODES": 2, "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
STEP |= {"SLURM_PROCID": 0, "SLURM_LOCALID": 0, "SLURM_NODEID": 0, "SLURM_STEP_NODELIST": "node[1-2]"}
TORCHRUN = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2, "TORCHELASTIC_RUN_ID": "none"}
OPEN_MPI = {f"OMPI_COMM_WORLD_{name}": value for name, value in {"RANK": 0, "SIZE": 2, "LOCAL_RANK": 0}.items()}


@pytest.mark.parametrize(
    ("launcher", "rank", "variables"),
    [
        ("srun", "SLURM_PROCID", STEP),
        ("torchrun", "RANK", TORCHRUN),
        ("mpirun", "OMPI_COMM_WORLD_RANK", {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": 2}),
    ],
)
@pytest.mark.parametrize("argv", [["supervise", "mine.yaml"], ["exec", "--", "true"]])
def test_only_the_first_of_many_supervisors_says_that_one_is_enough(
    launcher: str, rank: str, variables: dict[str, Any], argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    os.environ.update({name: str(value) for name, value in variables.items()})
    assert cli.main(argv) == EXIT_REQUEST
    assert f"leave {launcher} out, the toolkit starts the ranks itself" in capsys.readouterr().err
    os.environ.update({rank: "1", "SLURM_NODEID": "1"})
    with pytest.raises(SystemExit) as silent:
        cli.main(argv)
    assert silent.value.code == EXIT_DONE
    assert capsys.readouterr().err == ""
    assert rundir.all_runs() == []


@pytest.mark.parametrize(
    "variables",
    [
        {**STEP, "SLURM_STEP_NUM_TASKS": 1, "SLURM_STEP_NUM_NODES": 1, "SLURM_STEP_TASKS_PER_NODE": 1}
        | {"SLURM_STEP_NODELIST": "node1"},
        {"SLURM_STEP_ID": 4294967290, "SLURM_STEP_NUM_TASKS": 2, "SLURM_PROCID": 0},  # the shell of salloc
        {**TORCHRUN, "TORCHELASTIC_RUN_ID": ""},  # a batch script has exported them
        {"RANK": 0},
        {**TORCHRUN, "TOOLKIT_ATTEMPT": 1},
    ],
)
def test_a_supervisor_that_is_alone_is_not_refused(variables: dict[str, Any]) -> None:
    assert served(enter(**{name: value for name, value in variables.items() if value != ""})).code.is_dir()


def test_a_shell_with_a_terminal_is_alone_in_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "isatty", lambda file: file == 0)
    assert served(enter(**STEP)).code.is_dir()


ELEMENT = {"SLURM_ARRAY_JOB_ID": 40, "SLURM_ARRAY_TASK_ID": 2}


@pytest.mark.parametrize(
    ("job", "ours"),
    [
        ("box-42", {}),
        ("box-41", {"SLURM_CLUSTER_NAME": "other"}),
        ("box-40_1", ELEMENT),
        ("box-40", ELEMENT),
        ("box-41", ELEMENT),
    ],
)
def test_the_run_of_another_job_cluster_or_array_element_is_left_alone(job: str, ours: dict[str, Any]) -> None:
    run = earlier_run(job)
    assert served(enter(SLURM_RESTART_COUNT=1, **ours)).path != run.path


def test_an_array_element_goes_on_with_its_own_run() -> None:
    first, second = earlier_run("box-40_1"), earlier_run("box-40_2")
    assert served(enter(SLURM_RESTART_COUNT=1, **ELEMENT)).path == second.path != first.path


@pytest.mark.parametrize(
    ("missing", "says"),
    [
        ("SLURM_JOB_ID", "SLURM_JOB_ID and SLURM_JOB_NODELIST are not set"),
        ("SLURMD_NODENAME", r"is not a node of job 41.*`srun --interactive --preserve-env --pty bash`"),
    ],
    ids=["outside of an allocation", "on the login node of one"],
)
def test_where_no_rank_can_start_it_says_what_is_missing_and_how_to_come_to_a_node(missing: str, says: str) -> None:
    del os.environ[missing]
    with pytest.raises(RequestError, match=says):
        inside_allocation.supervise("mine.yaml", [])
    assert rundir.all_runs() == []


def test_a_wrong_config_leaves_no_run_behind() -> None:
    with pytest.raises(ConfigError, match=r"optim\.rl"):
        inside_allocation.supervise("mine.yaml", ["optim.rl=0.1"])
    assert rundir.all_runs() == []


def test_sources_that_cannot_be_copied_leave_no_run_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: Path, target: Path, **more: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("toolkit.run.prepare.snapshot._copy", full)
    with pytest.raises(OSError, match="No space"):
        inside_allocation.supervise("mine.yaml", [])
    assert list((tmp_path / "runs").glob("*/*")) == []


@pytest.fixture
def supervised(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Return a list of the runs for which a supervisor is started."""
    seen: list[tuple[str, str]] = []
    monkeypatch.setattr(entry, "supervise", lambda *args: seen.append(args))
    return seen


def test_what_the_batch_script_became_supervises_and_tells_no_child_to(supervised: list[tuple[str, str]]) -> None:
    run = earlier_run("box-41")
    os.environ[RUN_VARIABLE] = str(run.path)
    inside_allocation.supervise(str(run.config), [])
    assert supervised == [(str(run.path), "slurm")]
    assert RUN_VARIABLE not in os.environ


def test_a_foreign_script_has_no_copy_to_run_from_and_is_supervised_right_here(
    run: RunDir,
    supervised: list[tuple[str, str]],
) -> None:
    inside_allocation.enter(lambda allocation: run)
    assert supervised == [(str(run.path), "slurm")]


@pytest.mark.parametrize("wanted", [True, False])
def test_a_follow_up_job_supervises_only_if_its_predecessor_was_taken_away(
    supervised: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch, wanted: bool
) -> None:
    slurm = FakeSlurm()
    predecessor = slurm.sbatch(["--no-requeue", "job.sh"])
    slurm.start(predecessor)
    if wanted:
        slurm.fail_node(predecessor)
    else:
        slurm.finish(predecessor)
    monkeypatch.setattr(inside_allocation, "Slurm", lambda: slurm)
    run = earlier_run("box-41")
    fsio.make_dir(run.logs)
    os.environ.update({RUN_VARIABLE: str(run.path), PREDECESSORS_VARIABLE: predecessor})
    inside_allocation.supervise(str(run.config), [])
    assert supervised == ([(str(run.path), "slurm")] if wanted else [])
    assert PREDECESSORS_VARIABLE not in os.environ


def test_a_follow_up_job_of_a_run_that_another_job_has_meanwhile_writes_nothing(
    supervised: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = FakeSlurm()
    jobs = [slurm.sbatch(["--no-requeue", "job.sh"]) for _ in range(2)]
    for job in jobs:
        slurm.start(job)
    slurm.fail_node(jobs[0])
    monkeypatch.setattr(inside_allocation, "Slurm", lambda: slurm)
    run = earlier_run("box-41")
    fsio.make_dir(run.logs)
    claim = Claim.of_job(run, Allocation(("node1",), (1,), 1, job_id=jobs[1]), "token")
    os.environ.update({RUN_VARIABLE: str(run.path), PREDECESSORS_VARIABLE: jobs[0]})
    os.environ[ownership.TOKEN_VARIABLE] = "token"
    inside_allocation.supervise(str(run.config), [])
    assert supervised == []
    assert run.result() is None
    assert claim.holds()
