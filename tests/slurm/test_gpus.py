"""Jobs that ask for GPUs in each of sbatch's ways: every node's ranks see all GPUs that the job has there.

The ways are the rows of the table in docs/gpu.md.
"""

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from typing import NamedTuple

import pytest

from tests.pages import ROOT
from tests.slurm.conftest import start_box, visit
from tests.slurm.site import END_S, Site
from toolkit.files import rundir

pytestmark = [pytest.mark.slurm, pytest.mark.sample(2)]

GPUS = {"node1": 4, "node2": 4, "node3": 2}
RANK = 'echo "rank $SLURM_PROCID $SLURMD_NODENAME ${CUDA_VISIBLE_DEVICES:-none} ${SLURM_GPUS:-none}"'


@pytest.fixture(scope="module")
def gpu_site(request: pytest.FixtureRequest) -> Iterator[Site]:
    """A site whose nodes have device files of GPUs, which the checks of a node count where no driver answers."""
    with ExitStack() as stack:
        types = ("fake", "fake", "other", "other")
        box = start_box(
            stack, nodes=3, cpus=8, profile="plain", gpus=[*GPUS.values()], gpu_types=types, gpu_shares={"shard": 4}
        )
        for node, gpus in GPUS.items():
            box.run(["touch", *(f"/dev/nvidia{index}" for index in range(gpus))], node=node)
        yield from visit(box, request)


def run_job(site: Site, name: str, *options: str, also: str = "true") -> dict[str, tuple[str, str]]:
    """Run ``RANK`` by `toolkit exec` in a job with these options. Return what each node's ranks say, if they agree."""
    script = site.folder / f"{name}.sh"
    script.write_text(
        f"#!/bin/bash\nexport TOOLKIT_RUNS={site.runs}\n{also}\nexec toolkit exec --name {name} -- sh -c '{RANK}'\n"
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


class Way(NamedTuple):
    """A row of the table: sbatch's options, and what the ranks see on the first, second and third node."""

    options: list[str]
    seen: list[str]
    since: str  #: the first version of Slurm that has the options

    def __str__(self) -> str:
        return " ".join(self.options)


def ways() -> list[Way]:
    page = (ROOT / "docs/gpu.md").read_text()
    table = page.partition("## Requests for GPUs\n")[2].partition("|\n\n")[0].splitlines()
    rows = [row.strip("| ").split(" | ") for row in table if row.startswith("| `")]
    return [
        Way(options.strip("`").split(), re.findall("`(.+?)`", seen), "".join(re.findall("from Slurm (.+) on", seen)))
        for options, seen, _ in rows
    ]


@pytest.mark.parametrize("way", [pytest.param(way, id=str(way)) for way in ways()])
def test_each_way_to_ask_for_gpus_gives_ranks_those_that_the_page_says(gpu_site: Site, way: Way) -> None:
    if gpu_site.box.spec.slurm < way.since:
        refused = gpu_site.box.run(["sbatch", *way.options, "--wrap=true"], check=False)
        assert "unrecognized option" in refused.stderr
        return
    found = run_job(gpu_site, re.sub(r"\W+", "-", str(way)).strip("-"), *way.options)
    seen = (way.seen or ["none"]) * (1 if len(way.seen) > 1 else 2)
    assert {host: devices for host, (devices, _) in found.items()} == dict(zip(GPUS, seen, strict=False))


def test_nodes_with_unequal_numbers_of_gpus_have_their_own(gpu_site: Site) -> None:
    """The check of the nodes beside it, and the variable that scripts read, are there as well."""
    doctor = f"toolkit doctor --json >{gpu_site.folder}/report.json"
    seen = run_job(gpu_site, "uneven", "--nodes=3", "--gpus=10", also=doctor)
    assert seen == {"node1": ("0,1,2,3", "10"), "node2": ("0,1,2,3", "10"), "node3": ("0,1", "10")}
    report = json.loads((gpu_site.folder / "report.json").read_text())
    assert report["fine"], report
    figures = [f["figure"] for node in report["nodes"].values() for f in node["findings"] if f["check"] == "gpus"]
    assert figures == ["2"] * 3


def test_components_have_gpus_of_their_own(gpu_site: Site) -> None:
    second = ["--nodes=1", "--ntasks=2", "--nodelist=node3", "--gpus=2"]
    seen = run_job(gpu_site, "components", "--nodes=1", "--ntasks=2", "--gpus-per-node=4", ":", *second)
    assert {host: devices for host, (devices, _) in seen.items()} == {"node1": "0,1,2,3", "node3": "0,1"}


@pytest.mark.parametrize(
    ("name", "option", "devices"),
    [("gpus", "--gpus-per-node=2", ["0", "0", "1", "1"]), ("shards", "--gres=shard:4", ["0"] * 4)],
)
def test_each_rank_sees_the_one_gpu_that_it_shares(gpu_site: Site, name: str, option: str, devices: list[str]) -> None:
    script = gpu_site.folder / f"shared-{name}.sh"
    command = f"toolkit exec cluster.tasks_per_gpu={devices.count('0')} --name {script.stem} -- sh -c '{RANK}'"
    script.write_text(f"#!/bin/bash\nexport TOOLKIT_RUNS={gpu_site.runs}\nexec {command}\n")
    job = gpu_site.sbatch("--nodes=2", "--ntasks-per-node=4", option, str(script))
    gpu_site.box.wait_job(job, END_S)
    run = gpu_site.find(script.stem)
    said = [run.rank_log(1, rank).read_text().split() for rank in range(8)]
    expected = [["node1", device] for device in devices] + [["node2", device] for device in devices]
    assert [words[2:4] for words in said] == expected


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["cluster.gpus_per_node=9"], "ask for less: `sinfo"),
        (["cluster.gpus_per_node=1", "cluster.gpu_type=h100"], "ask for less: `sinfo"),
        (["cluster.gpus_per_node=1", "cluster.extra.gres=shard:1"], "shard and mps do not go with gpu"),
        (["cluster.extra.gres=goo:1"], "`sinfo -o '%P %G'` shows what there is"),
    ],
)
def test_what_the_site_has_not_is_refused_before_anything_is_queued(
    gpu_site: Site, overrides: list[str], says: str
) -> None:
    runs = rundir.all_runs(gpu_site.runs)
    command = ["toolkit", "exec", *overrides, "--", "true"]
    refused = gpu_site.box.run(command, check=False, env={"TOOLKIT_RUNS": str(gpu_site.runs)})
    assert (refused.returncode, refused.stdout) == (2, "")
    assert says in refused.stderr
    assert "Traceback" not in refused.stderr
    assert gpu_site.box.run(["squeue", "--noheader"]).stdout == ""
    assert rundir.all_runs(gpu_site.runs) == runs


def test_what_no_key_can_say_is_asked_for_in_sbatchs_words(gpu_site: Site) -> None:
    """Two nodes of at most three are free for a job of one GPU type each, which `--gpus-per-node` could not say."""
    extra = "cluster.extra={gres: 'gpu:fake:1,gpu:other:1', nodes: 2-3, exclusive: user}"
    sizes = ["cluster.nodes=2", "cluster.tasks_per_node=2", "cluster.gpus_per_node=2", "cluster.mem_gb=0"]
    gpu_site.run("toolkit", "exec", extra, *sizes, "--name", "beyond", "--wait", "--", "sh", "-c", RANK)
    run = gpu_site.find("beyond")
    said = [path.read_text().split() for path in sorted(run.attempt_logs(1).glob("rank-*.log"))]
    assert [words[2:4] for words in said] == [["node1", "0,2"], ["node1", "0,2"], ["node2", "0,2"], ["node2", "0,2"]]
