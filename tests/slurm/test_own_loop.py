"""A script with its own loop, preempted and killed on a real Slurm.

It ends as an undisturbed one.
"""

import os
import signal
from pathlib import Path

import pytest

from tests.slurm.site import END_S, Site
from tests.waiting import wait_for
from toolkit.checkpoint.folder import CheckpointFolder
from toolkit.files.rundir import RunDir

pytestmark = pytest.mark.slurm

STEPS = 240  #: of 15 epochs
SCRIPT = """
import time
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import toolkit

inputs = torch.randn(256, 8, generator=torch.Generator().manual_seed(5))
dataset = TensorDataset(inputs, (inputs.sum(1) > 0).long())
with toolkit.start() as run:
    net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 2))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    loader = DataLoader(dataset, 8, sampler=DistributedSampler(dataset))
    run.resumable(model=model, optimizer=optimizer, scheduler=scheduler)
    for epoch in run.epochs(15):
        for x, y in run.steps(loader):
            time.sleep({pause_s})
            loss = cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
        scheduler.step()
"""
SIZE = ["cluster.nodes=2", "cluster.tasks_per_node=1", "checkpoint.every_steps=20"]


def submitted(site: Site, project: Path, how: str, name: str) -> RunDir:
    script = f"{name}.py"
    if how == "submit":
        site.run("toolkit", "submit", script, *SIZE, cwd=project)
    else:
        site.run("toolkit", "exec", *SIZE, "--", "python", str(project / script), cwd=project)
    return site.find(name)


@pytest.mark.parametrize("how", ["submit", pytest.param("exec", marks=pytest.mark.soak)])
def test_a_preempted_and_killed_loop_of_ones_own_ends_as_the_undisturbed_one(site: Site, how: str) -> None:
    project = site.project()
    (project / "quick.py").write_text(SCRIPT.format(pause_s=0.0))
    (project / "slow.py").write_text(SCRIPT.format(pause_s=0.05))
    quick = submitted(site, project, how, "quick")
    assert wait_for(quick.result, END_S, "a result").state == "completed"
    run = submitted(site, project, how, "slow")
    wait_for(lambda: list(run.checkpoints.glob("step-*")), END_S, "a checkpoint")
    site.preempt()
    second = run.rank_log(2, 0)
    wait_for(lambda: second.exists() and "resuming from" in second.read_text(), END_S, "the second attempt")
    # The kill comes once the second attempt has resumed: both ways back are in one run.
    os.kill(site.ranks(command="toolkit run" if how == "submit" else "slow.py")[-1], signal.SIGKILL)
    result = wait_for(run.result, END_S, "a result")
    assert (result.state, result.step) == ("completed", STEPS)
    causes = [(attempt.cause, attempt.decision) for attempt in run.attempts()]
    assert [decision for _, decision in causes] == ["requeue", "restart", "finish"]
    stores = [CheckpointFolder(each.checkpoints) for each in (quick, run)]
    mine, other = (checkpoints.verify(checkpoints.list()[0]) for checkpoints in stores)
    assert (mine.step, mine.meta["position"][0]) == (other.step, other.meta["position"][0]) == (STEPS, 14)
    assert mine.tensors == other.tensors
