"""What tests of runs on this machine share: an environment whose processes must all end."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import nobody_left, processes_with, wait_for


@pytest.fixture
def env(tmp_path: Path) -> Iterator[dict[str, str]]:
    """An environment of its own for each test; whatever stays behind is a failure. Who waits for a result has it a
    moment before the supervisor that wrote it has ended."""
    variables = {**os.environ, "TOOLKIT_RUNS": str(tmp_path / "runs"), "OMP_NUM_THREADS": "1"}
    yield variables
    try:
        wait_for(lambda: nobody_left(variables), 10, "no process of the run")
    finally:
        for pid in processes_with(f"TOOLKIT_RUNS={tmp_path}/runs"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
