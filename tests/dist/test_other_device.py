"""Ranks on an accelerator that is not CUDA's: a device of a package's own, compiled here, with two devices a machine.

Its kernels are the CPU's. A run that is killed and continued must end with the bits of one that is left alone.
"""

import json
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from tests.dist.mpi import ROOT, mpirun
from toolkit.checkpoint import manifest
from toolkit.files import rundir

pytest.importorskip("mpi4py")
pytestmark = pytest.mark.dist

STEPS = 20
RUN = ["-m", "toolkit", "run", "configs/digits_ddp.yaml", f"train.max_steps={STEPS}", "checkpoint.every_steps=10"]
#: Rank 0 dies in a save, after the one of step 10.
KILL = json.dumps([{"kind": "SIGKILL", "rank": 0, "attempt": 1, "operation": 25}])
#: What the toolkit says of the device in a process of its own.
ASK = """
import json, torch
from toolkit.devices import accelerator
kind, device = accelerator.kind(), torch.device("toy", 1)
accelerator.module_of(device).set_device(device)
accelerator.seed(7)
with accelerator.forked_rng():
    accelerator.module_of(device).manual_seed(8)
kept = torch.ones(3, device=device)
print(json.dumps({
    "kind": [kind.name, kind.type, kind.backend], "count": accelerator.count(), "build": accelerator.build(),
    "name": accelerator.name_of(device), "seeds": [each.initial_seed() for each in torch.toy.default_generators],
    "identities": accelerator.identities(2),
    "peak": accelerator.memory_peak_bytes(device) > 0, "states": len([*accelerator.random_states()]),
}))
"""


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """Compile the device; return the folder for PYTHONPATH that has it."""
    compiler = shutil.which("c++")
    if compiler is None or not Path(sysconfig.get_path("include"), "Python.h").exists():
        pytest.skip("there is no C++ compiler, or no Python.h, to make a device with")
    folder, source = tmp_path / "site", Path(__file__).parent / "toy_device"
    (folder / "toy_device-1.0.dist-info").mkdir(parents=True)
    (folder / "toy_device-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: toy-device\nVersion: 1.0\n")
    (folder / "toy_device-1.0.dist-info/entry_points.txt").write_text("[torch.backends]\ntoy = toy_device:install\n")
    shutil.copy(source / "toy_device.py", folder)
    includes = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    command = [compiler, "-shared", "-fPIC", "-std=c++20", "-O0", "-w", "-DTORCH_EXTENSION_NAME=toy_device_ext"]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    command += [f"-isystem{path}" for path in includes]
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
    libraries += [f"-l{name}" for name in ("c10", "torch_cpu", "torch", "torch_python")]
    output = ["-o", str(folder / "toy_device_ext.so"), *libraries]
    built = subprocess.run([*command, str(source / "toy_device.cpp"), *output], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[-4000:]
    return folder


def test_ranks_on_a_device_that_is_not_cudas_go_on_bit_for_bit(toy: Path, tmp_path: Path) -> None:
    ask = subprocess.run(
        [sys.executable, "-c", ASK], env={"PYTHONPATH": str(toy)}, cwd=ROOT, capture_output=True, text=True
    )
    assert ask.returncode == 0, ask.stderr
    assert json.loads(ask.stdout) == {
        "kind": ["toy", "toy", "gloo"],
        "count": 2,
        "build": f"torch {torch.__version__}, built for toy",
        "name": "Toy 2000",
        "seeds": [7 ^ 1 ^ 0, 7],
        "identities": ["0", "1"],
        "peak": True,
        "states": 1,
    }
    # gloo does not know the device, and its package brings no process group.
    alone = subprocess.run(
        [sys.executable, *RUN],
        env={"PYTHONPATH": str(toy), "TOOLKIT_RUNS": str(tmp_path / "refused")},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert alone.returncode == 2, alone.stderr
    said = "toolkit: error: dist.backend: gloo serves cpu and cuda, and this rank's device is toy: use dist.backend=mpi"
    assert said in alone.stderr
    # Over MPI: killed in a save and continued, and undisturbed.
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    of_toy = {"PYTHONPATH": str(toy), "TOOLKIT_RUNS": str(killed)}
    code, said = mpirun(2, [*RUN, "dist.backend=mpi"], {**of_toy, "TOOLKIT_CHAOS": KILL})
    assert code != 0, said
    (run,) = rundir.all_runs(killed)
    code, said = mpirun(2, [*RUN, "dist.backend=mpi"], {**of_toy, "TOOLKIT_RUN_DIR": str(run.path)})
    assert code == 0, said
    assert {f"rank {rank} of 2: mpi4py on toy:{rank}" in said for rank in range(2)} == {True}, said
    code, said = mpirun(2, [*RUN, "dist.backend=mpi"], {**of_toy, "TOOLKIT_RUNS": str(whole)})
    assert code == 0, said
    ends = [rundir.all_runs(folder)[0].checkpoints / f"step-{STEPS:08d}" for folder in (killed, whole)]
    one, other = (end / manifest.file_name(0) for end in ends)
    assert one.read_bytes() == other.read_bytes()
    about = manifest.read(ends[0]).meta["conditions"]
    assert about["processor"] == "Toy 2000"
    assert run.result().metrics["eval/accuracy"] > 0.85  # as on the CPU
