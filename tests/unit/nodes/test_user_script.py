"""A user script as a rank. The process it becomes, its environment, and how its failure is reported."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

from tests.waiting import PATIENCE
from toolkit import config as configs
from toolkit.base import fsio
from toolkit.base.errors import RequestError
from toolkit.config import JobConfig
from toolkit.files import rundir
from toolkit.files.rundir import RANK_VARIABLE, RunDir
from toolkit.nodes.start import user_script
from toolkit.run.attempt.error_files import read_error_file

ROOT = Path(__file__).parents[3]

#: Rank 4 of the step that srun 22.05 starts for seven tasks on three nodes, 2 + 4 + 1, as the task sees it. Here srun
#: runs on this machine.
SRUN = {
    "SLURM_CLUSTER_NAME": "box",
    "SLURM_JOB_ID": "41",
    "SLURM_JOB_NODELIST": "node[1-3]",
    "SLURM_NTASKS": "7",
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_STEP_ID": "0",
    "SLURM_STEPID": "0",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NODELIST": "node[1-3]",
    "SLURM_STEP_TASKS_PER_NODE": "2,4,1",
    "SLURM_PROCID": "4",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "2",
    "SLURM_GTIDS": "2,3,4,5",
    "SLURM_CPUS_PER_TASK": "3",
    "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
    "SLURM_SRUN_COMM_PORT": "40123",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Return a run whose copy of the sources is this checkout. Imports come from there."""
    run = rundir.create("script", tmp_path_factory.mktemp("it's runs"))
    rundir.link_code(run.path, str(ROOT))
    fsio.make_dir(run.attempt_logs(2))
    return run


def write_command(run: RunDir, words: list[str]) -> None:
    fsio.write_atomic(run.config, configs.dump_config(JobConfig(job=configs.SCRIPT_JOB, argv=words)))


def environment(run: RunDir) -> dict[str, str]:
    """Return the environment that a supervisor gives srun, and srun the rank."""
    return {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join([str(run.code), "/their/lib"]),
        "PYTHONSAFEPATH": "1",
        "TOOLKIT_SUPERVISED": "1",
        "TOOLKIT_RUN_DIR": str(run.path),
        "TOOLKIT_ATTEMPT": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "MASTER_PORT": "4000",
        "OMP_NUM_THREADS": "3",
        **SRUN,
    }


class Became(NamedTuple):
    """The process that the rank became, as it describes itself."""

    same_process: bool
    arguments: list[str]
    environ: dict[str, str]
    stderr: str


@pytest.fixture(scope="module")
def became(run: RunDir, tmp_path_factory: pytest.TempPathFactory) -> Became:
    """Start a rank whose script prints its process id, arguments and environment."""
    script = 'echo $$; printf "%s\\0" "$@"; echo; env -0'
    write_command(run, ["sh", "-c", script, "sh", "train it.py", "--lr=1", "--", "$HOME"])
    with rank(run, environment(run), tmp_path_factory.mktemp("elsewhere")) as process:
        out, err = process.communicate(timeout=PATIENCE * 60)
    pid, arguments, environ = out.split("\n", 2)
    entries = [entry.split("=", 1) for entry in environ.split("\0") if entry]
    return Became(int(pid) == process.pid, arguments.split("\0")[:-1], dict(entries), err)


def rank(run: RunDir, environ: dict[str, str], folder: Path) -> subprocess.Popen[str]:
    argv = [sys.executable, "-P", "-m", "toolkit.nodes.start.user_script", str(run.config)]
    pipe = subprocess.PIPE
    return subprocess.Popen(argv, cwd=folder, env=environ, stdout=pipe, stderr=pipe, text=True)


def test_the_rank_becomes_the_command_word_for_word_and_says_nothing_of_its_own(became: Became) -> None:
    assert became.same_process  # signals meant for the script reach the script
    assert became.arguments == ["train it.py", "--lr=1", "--", "$HOME"]
    assert became.stderr == ""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "4"),
        ("WORLD_SIZE", "7"),
        ("LOCAL_RANK", "2"),
        ("LOCAL_WORLD_SIZE", "4"),
        ("GROUP_RANK", "1"),
        ("GROUP_WORLD_SIZE", "3"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "4000"),
        ("GLOO_SOCKET_IFNAME", "lo"),
        ("OMP_NUM_THREADS", "3"),
        ("TORCHELASTIC_USE_AGENT_STORE", "True"),
        ("TORCHELASTIC_RESTART_COUNT", "1"),
        ("PYTHONFAULTHANDLER", "1"),
    ],
)
def test_the_command_finds_what_torchrun_would_have_set(became: Became, name: str, value: str) -> None:
    assert became.environ[name] == value


def test_the_command_writes_its_errors_where_the_supervisor_looks(became: Became, run: RunDir) -> None:
    assert Path(became.environ["TORCHELASTIC_ERROR_FILE"]) == run.error_file(2, 4)
    assert became.environ["TORCHELASTIC_RUN_ID"] == run.id


def test_the_command_and_all_that_it_starts_are_known_as_the_rank(became: Became, run: RunDir) -> None:
    assert became.environ[RANK_VARIABLE] == f"2/4/{run.path}"


def test_the_command_imports_from_its_own_folder_and_not_from_ours(became: Became) -> None:
    assert "PYTHONSAFEPATH" not in became.environ
    assert became.environ["PYTHONPATH"] == "/their/lib"


@pytest.mark.parametrize("paths", ["", "{code}", "{code}:{code}", ":{code}:"])
def test_an_import_path_that_was_ours_alone_is_gone(run: RunDir, paths: str) -> None:
    """An empty path would put the current folder on the import path."""
    environ = {"PYTHONPATH": paths.format(code=run.code), "HOME": "/h"}
    assert user_script.restore_import_path(environ, run.code) == {"HOME": "/h"}


@pytest.mark.parametrize("attempt", [1, 2])
def test_a_command_that_is_not_there_is_one_line_that_names_it_and_the_host(
    run: RunDir, tmp_path: Path, attempt: int
) -> None:
    write_command(run, ["no-such-program", "x.py"])
    with rank(run, {**environment(run), "TOOLKIT_ATTEMPT": str(attempt)}, tmp_path) as process:
        _, err = process.communicate(timeout=PATIENCE * 60)
    assert process.returncode == 1
    (line,) = err.splitlines()
    assert "no-such-program: cannot be started on node2: No such file or directory" in line
    assert read_error_file(run.error_file(attempt, 4)).comes_again is (attempt == 1), "a typing error, or the node"


def test_a_run_that_has_no_command_says_where_it_should_come_from(tmp_path: Path) -> None:
    run = rundir.create("none", tmp_path)
    write_command(run, [])
    with pytest.raises(RequestError, match=r"config\.yaml: argv: is missing: .* `toolkit exec`"):
        user_script.read_command(run)


def test_words_that_look_like_numbers_stay_words(tmp_path: Path) -> None:
    run = rundir.create("words", tmp_path)
    write_command(run, ["seq", "010", "ü", ""])
    assert user_script.read_command(run) == ["seq", "010", "ü", ""]


def test_what_torchs_own_handler_writes_about_a_failure_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "error-12.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    monkeypatch.setattr(time, "time", lambda: 1_700_000_000.9)
    try:
        raise ValueError("boom")
    except ValueError as error:
        ErrorHandler().record_exception(error)
    failure = read_error_file(path)
    assert (failure.rank, failure.how) == (12, "ValueError: boom")
    assert failure.traceback.startswith("Traceback (most recent call last)")
    assert failure.traceback.endswith("ValueError: boom\n")
    assert failure.time == 1_700_000_000
    assert not failure.out_of_memory


def test_a_foreign_rank_that_ran_out_of_the_gpus_memory_is_known_by_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    path = tmp_path / "error-0.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    try:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    except RuntimeError as error:
        ErrorHandler().record_exception(error)
    assert read_error_file(path).out_of_memory


@pytest.mark.parametrize("text", ["", '{"message": {"mess', "[1]", "null", '{"message": {}}', '{"message": {"a": 1}}'])
def test_an_error_file_that_was_never_finished_is_a_failure_without_words(tmp_path: Path, text: str) -> None:
    """torch writes the file in place. A killed rank, or a full disk, leaves a part of it."""
    path = tmp_path / "error-3.json"
    path.write_text(text)
    failure = read_error_file(path)
    assert (failure.rank, failure.how, failure.traceback) == (3, "no message", "")
    assert failure.time == path.stat().st_mtime  # without a time it would pass for the first of all


def test_a_damaged_config_ends_a_rank_with_one_line_and_its_report(run: RunDir, tmp_path: Path) -> None:
    fsio.write_atomic(run.config, f"job: {configs.SCRIPT_JOB}\n")
    with rank(run, environment(run), tmp_path) as process:
        _, err = process.communicate(timeout=PATIENCE * 60)
    assert err.count("\n") == 1
    assert err.startswith(f"toolkit exec: {run.config}: argv: is missing")
    failure = read_error_file(run.error_file(2, 4))
    assert failure.comes_again
    run.error_file(2, 4).unlink()
