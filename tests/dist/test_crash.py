"""A rank that fails says so, whatever its peers and its backend do then."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.dist

#: A rank whose backend's shutdown waits for a peer that sits in a collective: as NCCL's may. It takes gloo's place.
CRASH = """
import os, sys, torch.distributed as dist
from torch.distributed import distributed_c10d
from toolkit.config import DistConfig
from toolkit.ranks.session import open_session
def wait_for_ever(*_):
    print("waits", flush=True)
    sys.stdin.read()
dist.destroy_process_group = wait_for_ever
if sys.argv[1] == "nccl":
    dist.get_backend = lambda *_: "nccl"
    distributed_c10d._abort_process_group = lambda *_: print("aborted", flush=True)
with open_session(DistConfig(backend="gloo")) as session:
    raise ValueError("bad sample")
"""


@pytest.mark.parametrize(("backend", "then"), [("gloo", "waits"), ("nccl", "aborted")])
def test_a_failing_rank_writes_its_error_file_before_it_leaves_the_group(
    tmp_path: Path, backend: str, then: str
) -> None:
    env = {**os.environ, "TOOLKIT_RUN_DIR": str(tmp_path), "TOOLKIT_RUNS": str(tmp_path), "TOOLKIT_ATTEMPT": "3"}
    command = [sys.executable, "-c", CRASH, backend]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=env, text=True, **pipes) as process:
        assert process.stdout.readline() == f"{then}\n"
        said = json.loads((tmp_path / "logs/attempt-003/error-0.json").read_text())
        process.communicate()
    assert (said["rank"], said["type"], said["message"]) == (0, "ValueError", "bad sample")
    assert "Traceback" in said["traceback"]
    assert process.returncode == 1
