"""Real runs with `dist.backend: mpi`: beside gloo, killed and continued, and wrongly started."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import HashStore

from tests.dist.mpi import ROOT, mpirun
from tests.waiting import PATIENCE
from toolkit.checkpoint import manifest
from toolkit.checkpoint.whole import export
from toolkit.files import rundir

pytest.importorskip("mpi4py")
pytestmark = [pytest.mark.dist, pytest.mark.sample(1)]

STEPS, SAVED = 30, 10
RANKS = 3  # with two, a sum has no order
RUN = ["-m", "toolkit", "run", "configs/digits_ddp.yaml", f"train.max_steps={STEPS}", f"checkpoint.every_steps={SAVED}"]
#: Rank 0 dies in a save, the second one or so.
KILL = json.dumps([{"kind": "SIGKILL", "rank": 0, "attempt": 1, "operation": 25}])


def train(folder: Path, backend: str, **environ: str) -> tuple[int, str]:
    return mpirun(RANKS, [*RUN, f"dist.backend={backend}"], {"TOOLKIT_RUNS": str(folder), **environ})


def last_step(folder: Path) -> Path:
    """The checkpoint of the last step of the only run in ``folder``."""
    (run,) = rundir.all_runs(folder)
    return run.checkpoints / f"step-{STEPS:08d}"


def weights(checkpoint: Path, target: Path) -> dict[str, torch.Tensor]:
    export(checkpoint, manifest.read(checkpoint), target, "safetensors", run="this one")
    return load_file(target)


@pytest.mark.soak
def test_a_run_has_the_weights_of_one_on_gloo(tmp_path: Path) -> None:
    for backend in ("mpi", "gloo"):
        code, said = train(tmp_path / backend, backend)
        assert code == 0, said
    ours, theirs = (weights(last_step(tmp_path / name), tmp_path / f"{name}.safetensors") for name in ("mpi", "gloo"))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_killed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    code, said = train(tmp_path / "whole", "mpi")
    assert code == 0, said
    code, said = train(tmp_path / "killed", "mpi", TOOLKIT_CHAOS=KILL)
    assert code != 0, said
    (run,) = rundir.all_runs(tmp_path / "killed")
    assert not last_step(tmp_path / "killed").exists()
    code, said = train(tmp_path / "killed", "mpi", TOOLKIT_RUN_DIR=str(run.path))
    assert code == 0, said
    assert f"training from step {SAVED} to {STEPS}" in said
    whole, killed = (last_step(tmp_path / name) / manifest.file_name(0) for name in ("whole", "killed"))
    assert whole.read_bytes() == killed.read_bytes()


def test_no_rank_sends_before_the_last_one_has_opened_mpi() -> None:
    """A message that arrives while a rank opens Open MPI crashes it. A real start has too short a window to test."""
    from toolkit.plugins.mpi.backend.group import store_barrier

    store, size = HashStore(), 4
    with ThreadPoolExecutor(size) as pool:
        early = [pool.submit(store_barrier, store, rank, size) for rank in (3, 0, 2)]
        assert not wait(early, timeout=0.2).done
        store_barrier(store, 1, size)
        assert not wait(early, timeout=10).not_done


def test_a_launcher_that_mpi_does_not_know_is_named(tmp_path: Path) -> None:
    """Each of torchrun's ranks would be alone in a world of its own."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", *RUN, "dist.backend=mpi"]
    environ = {**os.environ, "TOOLKIT_RUNS": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(torchrun, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=PATIENCE * 120)
    assert done.returncode != 0
    assert "rank 1 of 2 is rank 0 of 1 for MPI" in done.stdout + done.stderr
    assert "srun --mpi=pmix" in done.stdout + done.stderr
