"""`toolkit doctor --prove --gpus` on CPUs: the same script as on GPUs, over gloo."""

import getpass
import json
import re
import socket
import subprocess
from pathlib import Path

import pytest

from tests.dist.test_local_runs import END_S, TOOLKIT
from tests.waiting import PATIENCE

pytestmark = [pytest.mark.dist, pytest.mark.soak]  # ten runs, minutes

GPU_OR_SLURM = {"matrix products", "copies from the host", "other interfaces", "preempt and resume", "spare node used"}


def test_the_evidence_of_a_machine_without_gpus_is_whole_but_for_gpus(env: dict[str, str], tmp_path: Path) -> None:
    folders = [folder for folder in env["PATH"].split(":") if not (Path(folder) / "sbatch").exists()]
    argv = [*TOOLKIT, "doctor", "--prove", "--gpus", "--json", "cluster.tasks_per_node=2", "dist.timeout_s=30"]
    environ = {**env, "PATH": ":".join(folders)}
    done = subprocess.run(
        argv, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=3 * PATIENCE * END_S, check=False
    )
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "gpu-evidence.json").read_text())
    assert json.loads(done.stdout)["proofs"] == record["proofs"]
    rows = {row["name"]: row for row in record["proofs"]}
    assert {name for name, row in rows.items() if row["is_proven"] is None} == GPU_OR_SLURM
    assert {row["is_proven"] for name, row in rows.items() if name not in GPU_OR_SLURM} == {True}
    assert rows["fsdp equal to one device"]["figure"] < 1e-4
    for how in ("kill", "stop"):
        assert rows[f"{how} and resume, bit for bit"]["text"].endswith("resumes: IDENTICAL")
    assert rows["hung rank named"]["text"].startswith("hang of rank 1,")
    page = (tmp_path / "gpu-evidence.html").read_text().partition("<main>")[2]
    assert all(name in page for name in rows)
    # Nothing that is sent has this machine's or this user's names.
    private = "|".join(map(re.escape, (socket.gethostname(), getpass.getuser(), str(tmp_path), str(Path.home()))))
    assert not re.search(rf"(?<!\w)({private})(?!\w)", page + json.dumps(record))
    assert not list((tmp_path / "runs").glob("*/*"))
