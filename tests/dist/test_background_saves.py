"""A rank whose peer dies while a save is written behind the training's back."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from tests.waiting import PATIENCE, wait_for
from toolkit.checkpoint.folder import newest_step

pytestmark = [pytest.mark.dist, pytest.mark.sample(1)]

ROOT = Path(__file__).parents[2]
RANKS = 3
#: The reference job on a disk that takes its time, but only behind the training's back. Who waits there asks the store
#: without pause: the exit of the process finds it in a call, which aborts the process (seen) unless it was ended first.
JOB = """
import threading, time
from jobs import classify
from toolkit.base import fsio
from toolkit.checkpoint import exchange

exchange._LONGEST_PAUSE_S = 1e-6

write = fsio.write_stream
def slow(*args):
    if threading.current_thread() is not threading.main_thread():
        time.sleep(2)
    return write(*args)

def main(config):
    fsio.write_stream = slow
    return classify.Classify.main(config, classify.Params())
"""
OVERRIDES = [
    "job=slow_disk",
    "train.epochs=1000",
    "checkpoint={every_steps: 20, background: true}",
    f"cluster.tasks_per_node={RANKS}",
]


def start_ranks(folder: Path, port: int) -> list[subprocess.Popen[str]]:
    """Start the ranks without a supervisor, which would end the survivors. The store outlives them."""
    (folder / "slow_disk.py").write_text(JOB)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    shared |= {"WORLD_SIZE": str(RANKS), "OMP_NUM_THREADS": "1"}
    shared |= {"PYTHONPATH": str(ROOT), "LOCAL_WORLD_SIZE": str(RANKS), "TOOLKIT_RUN_DIR": str(folder / "run")}
    (folder / "run").mkdir()
    argv = [sys.executable, "-m", "toolkit", "run", str(ROOT / "configs" / "digits_ddp.yaml"), *OVERRIDES]
    return [
        subprocess.Popen(
            argv,
            cwd=folder,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]


@pytest.mark.parametrize("victim", [0, 2], ids=["rank 0", "another rank"])
def test_a_rank_whose_peer_dies_in_a_background_save_ends_with_an_error_and_no_core(
    tmp_path: Path, victim: int
) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = start_ranks(tmp_path, store.port)
    saves = tmp_path / "run" / "checkpoints"
    try:
        wait_for(lambda: newest_step(saves) and [*saves.glob("step-*.tmp-*")], 60, "a save behind the back")
        ranks[victim].kill()
        errors = [rank.communicate(timeout=PATIENCE * 60)[1] for rank in ranks]
    finally:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                rank.kill()
    codes = [rank.returncode for rank in ranks]
    assert codes == [-signal.SIGKILL if rank == victim else 1 for rank in range(RANKS)], "\n".join(errors)
