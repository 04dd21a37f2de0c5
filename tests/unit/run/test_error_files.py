"""What a failing rank's own file says about its end."""

import argparse
import json
import logging
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from torch.utils.data import Dataset

from toolkit.base import logs
from toolkit.base.errors import ConfigError, JobCodeError, JobFailedError, ToolkitError
from toolkit.data.sampler import BatchPart
from toolkit.data.workers import SampleReader
from toolkit.files import error_file, rundir
from toolkit.run.attempt.error_files import read_error_file
from toolkit.run.attempt.verdict import RankFailure


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> rundir.RunDir:
    made = rundir.create("digits", tmp_path)
    monkeypatch.setenv(rundir.RUN_DIR_VARIABLE, str(made.path))
    monkeypatch.setenv("TOOLKIT_ATTEMPT", "1")
    return made


def reported(run: rundir.RunDir, error: BaseException) -> RankFailure:
    """Return what the supervisor reads of a rank that ended with ``error``."""
    try:
        raise error
    except type(error) as raised:
        error_file.write(raised, 0)
    return read_error_file(run.error_file(1, 0))


def test_an_error_of_a_data_worker_is_short_and_its_traceback_is_kept(run: rundir.RunDir) -> None:
    """torch gives the worker's traceback as the text; ours is a note."""
    frames = '  File "train.py", line 4, in __getitem__\n    raise ValueError("odd")\n' * 50
    torchs = f"Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n{frames}"
    failure = reported(run, RuntimeError(f"{torchs}ValueError: odd\n"))
    assert failure.how == "RuntimeError: Caught ValueError in DataLoader worker process 0. ValueError: odd"
    assert "line 4, in __getitem__" in failure.traceback


def test_an_error_of_our_data_worker_has_its_traceback_as_a_note(run: rundir.RunDir) -> None:
    class Odd(Dataset[int]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            raise ValueError("odd")

    error = SampleReader(Odd(), 0)[BatchPart(np.array([2]), 0, 1)]
    assert isinstance(error, JobFailedError)
    failure = reported(run, pickle.loads(pickle.dumps(error)))
    assert "\n" not in failure.how
    assert failure.how.endswith("cannot be loaded: ValueError: odd")
    assert "In the data worker:" in failure.traceback
    assert "in __getitem__" in failure.traceback


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:119] DefaultCPUAllocator: can't allocate memory: 4000 bytes"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:98] data. DefaultCPUAllocator: not enough memory"),
        RuntimeError("std::bad_alloc"),
        OSError(12, "Cannot allocate memory"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("HIP out of memory."),
        RuntimeError("NCCL Error 1: Cuda failure 2 'out of memory'"),
    ],
    ids=str,
)
def test_every_way_to_run_out_of_memory_is_known_as_one(run: rundir.RunDir, error: BaseException) -> None:
    failure = reported(run, error)
    assert failure.out_of_memory
    assert not failure.blames_node


def test_memory_that_torch_really_does_not_get_is_known_as_one(run: rundir.RunDir) -> None:
    program = (
        "import torch; from toolkit.files import error_file\n"
        "try: torch.empty(1 << 50)\n"
        "except RuntimeError as error: error_file.write(error, 0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    assert read_error_file(run.error_file(1, 0)).out_of_memory


@pytest.mark.parametrize(
    ("error", "comes_again"),
    [
        (JobCodeError("train.py:7: the loss is a tensor of shape ()"), True),
        (ConfigError("data.name: no"), True),
        (JobFailedError("data: worker 3 died"), False),
        (ToolkitError("rank 3 is gone"), False),
        (ValueError("boom"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_refusal_of_the_jobs_code_or_config_would_come_again(
    run: rundir.RunDir, error: BaseException, comes_again: bool
) -> None:
    failure = reported(run, error)
    assert failure.comes_again is comes_again
    assert failure.where.startswith("test_error_files.py:")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--lr", "3"], "unrecognized arguments: --lr 3"),
        (["--epochs", "x"], "argument --epochs: invalid int value: 'x'"),
    ],
)
def test_arguments_that_a_script_refuses_would_be_refused_again(run: rundir.RunDir, argv: list[str], says: str) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int)
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(argv)
    error_file.write(ended.value, 0)
    failure = read_error_file(run.error_file(1, 0))
    assert failure.how == f"ArgumentError: {says}"
    assert failure.comes_again


def test_another_exit_with_the_same_code_is_no_refusal(run: rundir.RunDir) -> None:
    assert not reported(run, SystemExit(2)).comes_again


def test_a_text_of_any_length_is_shortened_where_it_is_written(run: rundir.RunDir) -> None:
    try:
        raise ValueError("begins " + "x" * 30_000_000 + " ends") from KeyError("y" * 30_000_000)
    except ValueError as error:
        error_file.write(error, 0)
        log_line = logs.EscapingFormatter().format(
            logging.makeLogRecord({"msg": "%s", "args": (error,), "exc_info": sys.exc_info()})
        )
    assert run.error_file(1, 0).stat().st_size < 200_000
    assert len(log_line) < 100_000
    failure = read_error_file(run.error_file(1, 0))
    assert failure.how.startswith("ValueError: begins xxx")
    assert failure.how.endswith("xxx ends")
    assert "characters left out" in failure.how
    assert "in test_a_text_of_any_length" in failure.traceback
    assert (
        failure.traceback.index("KeyError") < failure.traceback.index("direct cause") < failure.traceback.index("ends")
    )


def test_a_long_text_that_torch_has_written_is_shortened_when_it_is_read(run: rundir.RunDir) -> None:
    said = {"message": {"message": "x" * 30_000_000, "extraInfo": {"py_callstack": "y" * 1_000_000}}}
    run.error_file(1, 0).parent.mkdir(parents=True)
    run.error_file(1, 0).write_text(json.dumps(said))
    failure = read_error_file(run.error_file(1, 0))
    assert len(failure.how) + len(failure.traceback) < 100_000
