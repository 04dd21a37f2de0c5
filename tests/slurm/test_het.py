"""Heterogeneous jobs: components of different size train one run, which comes back as that of any other job.

CI runs a sample; ``make soak`` all of them, on every Slurm version.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.slurm.site import Site, attempts_of, nothing_lost, reached
from tests.slurm.test_faults import tensors
from tests.slurm.test_nodes import killed
from tests.slurm.test_stop import completed, slow_project, submit
from toolkit.files import rundir
from toolkit.files.rundir import RunDir

pytestmark = [pytest.mark.slurm, pytest.mark.sample(1)]

STEPS = 300
COMPONENTS = "cluster.components=[{nodes: 1, tasks_per_node: 2}, {nodes: 2, tasks_per_node: 1}]"
SPARE = "cluster.spare_nodes=1"


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
    assert (first.cause, first.decision, first.nodes) == ("preempted", "requeue", ("node1", "node2", "node3"))
    nothing_lost(run)
    reached(run, first.step_end + 30)
    lost = run.status().nodes[1]
    with killed(site, lost):
        _, second = attempts_of(run, 2)
        assert (second.cause, second.decision, second.lost_nodes) == ("node_failure", "restart", (lost,))
        ends_like_one_component(site, project, run)
