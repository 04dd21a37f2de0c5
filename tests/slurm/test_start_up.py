"""The parts of a start on a real Slurm.

They add up to the time by the user's own clock and the script's.
"""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.slurm.site import END_S, START_S, Site, attempts_of
from tests.waiting import wait_for
from toolkit.metrics.start_up import PARTS

pytestmark = pytest.mark.slurm

#: Notes when each attempt's first step has ended. What the job imports, its data and its first step take a while.
SCRIPT = """
import time
import torch, toolkit
time.sleep(0.6)
with toolkit.start() as run:
    time.sleep(0.5)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.resumable(model=model, optimizer=optimizer)
    first = True
    for inputs in run.steps(torch.ones(100000, 4), total=100000):
        time.sleep(0.4 if first else 0.02)
        model(inputs).square().mean().backward()
        optimizer.step()
        if first and run.rank == 0:
            with open("FOLDER/first-steps", "a") as file:
                print(time.time(), file=file)
        first = False
"""


def test_the_parts_of_a_start_add_up_to_what_was_measured_outside(site: Site) -> None:
    project = site.folder / "project"
    project.mkdir()
    (project / "train.py").write_text(SCRIPT.replace("FOLDER", str(site.folder)))
    site.give(project)
    notes = site.folder / "first-steps"
    submitted = time.time()
    site.run("toolkit", "submit", "train.py", "cluster.nodes=2", "cluster.time_min=30", cwd=project)
    run = site.only_run()
    wait_for(lambda: run.step() > 30, END_S, "30 steps")
    os.kill(site.ranks(run.status().nodes[1])[0], signal.SIGKILL)
    (attempt,) = attempts_of(run, 1)
    wait_for(lambda: notes.exists() and len(notes.read_text().split()) == 2 and run.step() > 30, END_S, "a restart")
    wait_for(lambda: run.status().start_up.get("first_step"), START_S, "the second attempt's start")
    first, again = attempt.start_up, run.status().start_up
    ends = [float(line) for line in notes.read_text().split()]

    assert tuple(first) == tuple(again) == PARTS
    # Slurm tells times in whole seconds, and the command's own start, until it makes the run, is nobody's part.
    made = run.config.stat().st_mtime
    assert ends[0] - made - 1.8 <= sum(first.values()) <= ends[0] - submitted + 1.8
    assert sum(again.values()) == pytest.approx(ends[1] - attempt.ended, abs=0.8)
    for parts in (first, again):
        assert parts["program"] >= 0.55
        assert parts["data"] >= 0.5
        assert parts["first_step"] >= 0.4
        assert parts["group"] > 0.0
    assert min(first[part] for part in ("submit", "supervisor", "agents")) > 0.0
    assert [part for part in ("submit", "queue", "supervisor", "agents") if again[part]] == []
    told = json.loads(site.run("toolkit", "why", run.id, "--json"))["start_up"]
    assert told["1"] == dict(first)
    assert "start of attempt 2: " in site.run("toolkit", "why", run.id, "--all")
    page = site.folder / "report.html"
    site.run("toolkit", "report", run.id, "--to", str(page))
    assert "Where the start went" in Path(page).read_text()
    site.run("toolkit", "cancel", run.id)
