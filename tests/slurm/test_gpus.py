"""Jobs that ask for GPUs in each of sbatch's ways: every node's ranks see all GPUs that the job has there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.slurm.conftest import start_box, visit
from tests.slurm.site import END_S, Site
from toolkit.files import rundir

pytestmark = [pytest.mark.slurm, pytest.mark.sample(2)]

GPUS = {"node1": 4, "node2": 4, "node3": 2}
#: Names five GPUs, as the driver of a node does. The checks of a node count those that Slurm makes visible.
SMI = "#!/bin/sh\nfor gpu in 0 1 2 3 4; do echo $gpu, GPU-$gpu, 0, 80000; done\n"
RANK = 'echo "rank $SLURM_PROCID $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES ${SLURM_GPUS:-none}"'


@pytest.fixture(scope="module")
def gpu_box_site(request: pytest.FixtureRequest) -> Iterator[Site]:
    with ExitStack() as stack:
        box = start_box(stack, nodes=len(GPUS), cpus=8, profile="plain", gpus=[*GPUS.values()])
        yield from visit(box, request)


@pytest.fixture
def gpu_site(gpu_box_site: Site) -> Site:
    tools = gpu_box_site.folder / "bin"
    tools.mkdir(exist_ok=True)
    (tools / "nvidia-smi").write_text(SMI)
    (tools / "nvidia-smi").chmod(0o755)
    return gpu_box_site


def run_job(site: Site, name: str, *options: str, also: str = "true") -> dict[str, tuple[str, str]]:
    """Run ``RANK`` by `toolkit exec` in a job with these options. Return what each node's ranks say, if they agree."""
    script = site.folder / f"{name}.sh"
    script.write_text(
        f"#!/bin/bash\nexport PATH={site.folder}/bin:$PATH TOOLKIT_RUNS={site.runs}\n{also}\n"
        f"exec toolkit exec --name {name} -- sh -c '{RANK}'\n"
    )
    job = site.sbatch(*options, f"--chdir={site.folder}", str(script))
    site.box.wait_job(job, END_S)
    output = (site.folder / f"slurm-{job}.out").read_text()
    (run,) = [run for run in rundir.all_runs(site.runs) if run.path.parent.name == name]
    result = run.result()
    assert result is not None, output
    assert result.state == "completed", output
    (attempt,) = run.attempts()
    assert run.status().bad_nodes == {}
    logs = [path.read_text().split() for path in run.attempt_logs(attempt.attempt).glob("rank-*.log")]
    seen = {(host, devices, request) for _, _, host, devices, request in logs}
    assert len(seen) == len({host for host, *_ in seen}), output
    return {host: (devices, request) for host, devices, request in sorted(seen)}


ALL = "0,1,2,3"


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--nodes=2", "--gpus=8", "--ntasks-per-node=4"], id="of-the-job"),
        pytest.param(["--ntasks=8", "--gpus-per-task=1"], id="of-a-task"),
        pytest.param(["--gpus=8", "--ntasks-per-gpu=1"], id="tasks-of-a-gpu"),
        pytest.param(["--nodes=2", "--gres=gpu:fake:4", "--gpu-bind=closest"], id="of-a-node-with-type"),
        pytest.param(["--nodes=2", "--gpus-per-node=4"], id="of-a-node"),
        pytest.param(["--nodes=2", "--gpus-per-socket=4", "--sockets-per-node=1"], id="of-a-socket"),
        pytest.param(["--nodelist=node[1-2]", "--exclusive"], id="whole-nodes-without-a-request"),
        pytest.param(["--nodelist=node[1-2]", "--exclusive", "--gres=gpu:2"], id="whole-nodes-with-a-smaller-request"),
    ],
)
def test_each_way_to_ask_for_gpus_starts(gpu_site: Site, options: list[str], request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.id
    assert {host: devices for host, (devices, _) in run_job(gpu_site, name, *options).items()} == {
        "node1": ALL,
        "node2": ALL,
    }


def test_nodes_with_unequal_numbers_of_gpus_have_their_own(gpu_site: Site) -> None:
    """The check of the nodes beside it, and the variable that scripts read, are there as well."""
    doctor = f"toolkit doctor --json >{gpu_site.folder}/report.json"
    seen = run_job(gpu_site, "uneven", "--nodes=3", "--gpus=10", also=doctor)
    assert seen == {"node1": (ALL, "10"), "node2": (ALL, "10"), "node3": ("0,1", "10")}
    report = json.loads((gpu_site.folder / "report.json").read_text())
    assert report["fine"], report
    figures = [f["figure"] for node in report["nodes"].values() for f in node["findings"] if f["check"] == "gpus"]
    assert figures == ["2"] * 3
