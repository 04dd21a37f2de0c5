"""Every signal that Slurm, a site or a user can send, to every part of a job, at each phase of it.

The ranks run a loop of their own, with data workers that have started programs. Nothing is lost, no rank trains on
after a stop, and the cause that is named is the true one.
"""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.site import END_S, START_S, Site, nothing_lost
from tests.slurm.test_stop import held_up
from tests.waiting import wait_for
from toolkit.files.rundir import RunDir

pytestmark = [pytest.mark.slurm, pytest.mark.sample(3)]

STEPS = 48  #: of 6 epochs
SCRIPT = """
import os, pathlib, subprocess, time
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
import toolkit

HERE = pathlib.Path("PROJECT")  # not the copy that runs

def phase(name):
    if not (HERE / f"hold-{name}").exists():
        return
    (HERE / f"at-{name}-{os.environ['RANK']}").touch()
    while (HERE / f"hold-{name}").exists():
        time.sleep(0.02)

class Helped(Dataset):
    helper = None
    def __len__(self):
        return 128
    def __getitem__(self, index):
        self.helper = self.helper or subprocess.Popen("while read line; do echo $line; done", shell=True, text=True,
                                                      stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        print(index, file=self.helper.stdin, flush=True)
        return torch.full((4,), float(self.helper.stdout.readline()))

class Slow:
    def state_dict(self):
        phase("save")
        return {}
    def load_state_dict(self, state):
        pass

with toolkit.start() as run:
    phase("first start")
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    data = Helped()
    loader = DataLoader(data, 8, sampler=DistributedSampler(data), num_workers=1, persistent_workers=True)
    run.resumable(model=model, optimizer=optimizer, slow=Slow())
    for epoch in run.epochs(6):
        for x in run.steps(loader):
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
            if run.step == 5:
                phase("train")
        if epoch == 0:
            phase("evaluation")
phase("leaving")
"""
#: Where the signal goes: to all steps of the job, to its batch script, or to all processes.
TARGETS = {"step": (), "batch": ("--batch",), "all": ("--full",)}
SIGNALS = ("TERM", "USR1", "USR2", "INT", "HUP", "CONT")
IN_SCRIPT = ("first start", "train", "save", "evaluation", "leaving")
PHASES = ("queue", "shell", "python", "no agents", *IN_SCRIPT)


@contextlib.contextmanager
def processes_held(site: Site, phase: str) -> Iterator[None]:
    """Stop again and again what comes after the phase, and let it continue in the end."""
    words = {"python": "submitit.core._submit", "no agents": "toolkit.nodes.agent.node"}.get(phase)
    if words is None:
        yield
        return
    with held_up(site, words):
        yield
    for pid in [pid for pid, command in site.box.processes() if words in command]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def in_phase(site: Site, project: Path, phase: str) -> Iterator[RunDir]:
    """Submit the script, and hold it in the phase."""
    hold = project / f"hold-{phase}"
    hold.touch()
    shell = f"touch {project}/at-shell-0; while [ -e {project}/hold-shell ]; do sleep 0.1; done"
    options = ["cluster.nodes=2", "cluster.tasks_per_node=1", "checkpoint.every_steps=10", f'cluster.setup=["{shell}"]']
    if phase == "queue":
        options.append('cluster.extra={"hold": true}')
    with processes_held(site, phase):
        site.run("toolkit", "submit", "train.py", *options, cwd=project)
        run = site.only_run()
        job = site.job_of(run)
        if phase == "python":
            wait_for(lambda: any("submitit.core" in command for _, command in site.processes()), START_S, "Python")
        elif phase == "no agents":
            wait_for((run.logs / "supervisor.log").exists, START_S, "a supervisor")
        elif phase != "queue":
            ranks = 2 if phase in IN_SCRIPT else 1
            wait_for(lambda: len([*project.glob(f"at-{phase}-*")]) == ranks, END_S, f"the phase {phase}")
        yield run
    hold.unlink()
    if phase == "queue":
        site.run("scontrol", "release", job)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_loses_nothing_and_stops_or_does_not(site: Site, number: str, target: str, phase: str) -> None:
    project = site.folder / "project"
    project.mkdir()
    (project / "train.py").write_text(SCRIPT.replace("PROJECT", str(project)))
    site.give(project)
    with in_phase(site, project, phase) as run:
        # Slurm refuses it for a job without steps, or one that waits.
        print(site.run("scancel", *TARGETS[target], f"--signal={number}", site.job_of(run), check=False))
    result = wait_for(run.result, END_S, "a result")
    causes = [(attempt.cause, attempt.decision) for attempt in run.attempts()]
    if (number, target) in (("INT", "batch"), ("INT", "all")) and result.state == "stopped":
        assert causes[-1:] in ([], [("stopped", "finish")])  # as by Ctrl-C: a person has ended it
        site.run("toolkit", "resume", run.id)
        result = wait_for(run.result, END_S, "a result")
    attempts = run.attempts()
    print(*attempts, site.run("toolkit", "why", run.id, check=False), sep="\n")
    assert (result.state, result.step) == ("completed", STEPS)
    assert {attempt.cause for attempt in attempts} <= {"stopped", "completed"}
    nothing_lost(run)
    is_heard = number != "CONT" and phase in ("first start", "train", "save", "evaluation")
    assert len(attempts) == (2 if is_heard else 1) or (number != "CONT" and phase in ("no agents", "leaving"))
    wait_for(lambda: not site.processes(), 60, "no process of ours on any node")
