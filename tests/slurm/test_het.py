"""Heterogeneous jobs: components of different size train one run, which comes back as that of any other job.

CI runs a sample; ``make soak`` all of them, on every Slurm version.
"""

import json
import shutil
from pathlib import Path

import pytest

from tests.slurm.site import END_S, Site, attempts_of, nothing_lost, reached
from tests.slurm.test_faults import tensors
from tests.slurm.test_nodes import FEWER, NEITHER, killed
from tests.slurm.test_stop import completed, slow_project, submit
from tests.waiting import wait_for
from toolkit.checkpoint.folder import CheckpointFolder, newest_step
from toolkit.config import load_config
from toolkit.files import rundir
from toolkit.files.rundir import RunDir

pytestmark = [pytest.mark.slurm, pytest.mark.sample(1)]

ROOT = Path(__file__).parents[2]
STEPS = 300
COMPONENTS = "cluster.components=[{nodes: 1, tasks_per_node: 2}, {nodes: 2, tasks_per_node: 1}]"
SPARE = "cluster.spare_nodes=1"
#: A sample takes three times as long on the second component.
UNEQUAL = """
import os, time
from jobs import classify
from toolkit.data.loader import Loader
plain_at = Loader.at
def at(self, step):
    batch = plain_at(self, step)
    time.sleep(len(batch) * (0.002 if int(os.environ["RANK"]) < 2 else 0.006))
    return batch
def main(config):
    Loader.at = at
    return classify.Classify.main(config, classify.Params())
"""


def start(site: Site, project: Path, *overrides: str) -> RunDir:
    """A run that has made some steps and will take a while."""
    size = [f"train.max_steps={STEPS}", "checkpoint.every_steps=20"]
    run = submit(site, project, COMPONENTS, *size, *overrides)
    reached(run, 50)
    return run


def undisturbed(site: Site, project: Path) -> RunDir:
    """The same run on as many ranks of one component."""
    size = ["cluster.nodes=2", "cluster.tasks_per_node=2", f"train.max_steps={STEPS}"]
    site.run("toolkit", "submit", "slow.yaml", "name=plain", *size, cwd=project)
    [run] = [run for run in rundir.all_runs(site.runs) if run.name == "plain"]
    completed(site, run)
    return run


def ends_like_one_component(site: Site, project: Path, run: RunDir) -> None:
    completed(site, run)
    print(*(json.dumps([a.cause, a.decision, a.nodes, a.step_end, a.line]) for a in run.attempts()), sep="\n")
    assert {attempt.world_size for attempt in run.attempts()} == {4}
    assert tensors(run, STEPS) == tensors(undisturbed(site, project), STEPS)


def test_preempted_and_without_a_node_it_ends_as_the_same_ranks_of_one_component(site: Site) -> None:
    project = slow_project(site, 0.04)
    run = start(site, project, SPARE)
    site.preempt()
    (first,) = attempts_of(run, 1)
    assert (first.cause, first.decision) == ("preempted", "requeue")
    nothing_lost(run)
    reached(run, first.step_end + 30)
    lost = run.status().nodes[1]
    with killed(site, lost):
        _, second = attempts_of(run, 2)
        assert (second.cause, second.decision, second.lost_nodes) == ("node_failure", "restart", (lost,))
        ends_like_one_component(site, project, run)


def test_a_script_is_stopped_resumed_as_its_components_and_cancelled(site: Site) -> None:
    project = slow_project(site, 0.0)
    (project / "jobs/slow.py").write_text(UNEQUAL)
    shutil.copytree(ROOT / "sbatch", project / "sbatch")
    script = ["sbatch/ddp_het.sh", "slow.yaml", "data.balance=auto", "train.epochs=1000"]
    site.run("sbatch", f"--output={site.folder}/out", *script, cwd=project)
    run = site.only_run()
    reached(run, 80)
    assert run.status().tasks == (2, 1, 1)
    assert "running" in site.run("toolkit", "status", run.id)
    site.run("toolkit", "stop", run.id)
    assert wait_for(run.result, END_S, "a result").state == "stopped"
    folder = CheckpointFolder(run.checkpoints)
    *fast, third, fourth = folder.manifest(folder.path(newest_step(run.checkpoints))).meta["shares"]["cuts"][-1][1]
    assert min(fast) > max(third, fourth)
    # only the run's folder knows of the components now
    size = {"partition": "main", "cpus_per_task": 1}
    assert load_config(run.config, site=False).cluster.components == [
        {"nodes": 1, "tasks_per_node": 2, **size},
        {"nodes": 2, "tasks_per_node": 1, **size},
    ]
    wait_for(lambda: not site.run("squeue", "--noheader").strip(), END_S, "an empty queue")
    site.run("toolkit", "resume", run.id)
    wait_for(lambda: run.status().attempt == 2, END_S, "the second attempt")
    reached(run, 120)
    assert run.status().tasks == (2, 1, 1)
    job = site.job_of(run)
    assert {*site.run("squeue", "--noheader", "--format=%i").split()} == {f"{job}+0", f"{job}+1"}
    site.run("toolkit", "cancel", run.id)
    assert wait_for(run.result, END_S, "a result").state == "cancelled"
    assert site.box.wait_job(job)["JobState"] == "CANCELLED"


def test_the_only_node_of_the_first_component_lives_but_is_set_down(site: Site) -> None:
    """Slurm requeues that component alone, and would never start it: the batch script's end ends the others."""
    project = slow_project(site, 0.04)
    run = start(site, project)
    node = ["scontrol", "update", f"nodename={run.status().nodes[0]}"]
    site.box.run([*node, "state=down", "reason=fan"])
    (first,) = attempts_of(run, 1)
    assert (first.cause, first.decision) == ("node_failure", "requeue")
    site.box.run([*node, "state=resume"], check=False)  # it may have come back by itself
    ends_like_one_component(site, project, run)


@pytest.mark.soak
@pytest.mark.parametrize("how", [FEWER, NEITHER], ids=["fewer", "neither"])
def test_the_only_node_of_the_first_component_dies(site: Site, how: tuple[str, ...]) -> None:
    """Slurm would start that component again beside the others, if it had --no-kill."""
    project = slow_project(site, 0.04)
    run = start(site, project, *how)
    with killed(site, "node1"):
        (first,) = attempts_of(run, 1)
        assert (first.cause, first.decision) == ("node_failure", "requeue")
        ends_like_one_component(site, project, run)


@pytest.mark.soak
def test_a_cut_off_node_of_the_second_component_splits_no_run(site: Site) -> None:
    project = slow_project(site, 0.04)
    run = start(site, project, SPARE)
    site.box.cut_node("node2")
    try:
        attempts_of(run, 1)
    finally:
        site.box.join_node("node2")
    ends_like_one_component(site, project, run)
    assert run.attempts()[-1].nodes == ("node1", "node4", "node3")
    wait_for(lambda: not site.processes(), 60, "no process of ours on any node")
    site.box.wait_idle(120)


@pytest.mark.soak
def test_follow_up_jobs_have_the_components_too(site: Site) -> None:
    """The first is submitted at the login node, the others inside the job that they follow."""
    project = slow_project(site, 0.04)
    run = start(site, project, "cluster.partition=cancel")
    for number in (1, 2):
        wait_for(lambda n=number: run.status().attempt == n, END_S, f"attempt {number}")  # type: ignore[misc]
        reached(run, 70 * number)
        site.preempt()
        attempts_of(run, number)
    ends_like_one_component(site, project, run)
    assert len({attempt.job_id for attempt in run.attempts()}) == 3


@pytest.mark.soak
def test_at_its_time_limit_it_goes_on_in_another_start(site: Site) -> None:
    project = slow_project(site, 0.3)
    run = start(site, project, "cluster.time_min=1", "cluster.save_before_limit_s=10")
    completed(site, run)
    assert {attempt.cause for attempt in run.attempts()[:-1]} == {"timeout"}
    nothing_lost(run)
