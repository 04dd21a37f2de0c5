"""A run that waits for another one, which is preempted meanwhile, on a real Slurm."""

import json
import re
from pathlib import Path

import pytest

from tests.slurm.site import END_S, START_S, Site, reached
from tests.waiting import wait_for
from toolkit.files.rundir import RunDir

pytestmark = pytest.mark.slurm

#: It continues quickly as soon as a file is there.
FIRST = """
import pathlib, time
import torch
import toolkit
with toolkit.start() as run:
    run.resumable(model=torch.nn.Linear(1, 1))
    for step in run.steps(range(600), total=600):
        time.sleep(0.0 if pathlib.Path("{go}").exists() else 0.1)
        run.log(loss=1.0)
"""


def dependency(site: Site, run: RunDir) -> tuple[str, str]:
    """What Slurm says of the run's job: its state, and what it depends on."""
    text = site.run("scontrol", "show", "job", site.job_of(run))
    return re.search(r"JobState=(\S+)", text)[1], re.search(r"Dependency=(\S+)", text)[1]


def test_a_run_starts_only_when_the_one_it_waits_for_has_completed(site: Site) -> None:
    project, seen, go = site.project(), site.folder / "seen", site.folder / "go"
    (project / "first.py").write_text(FIRST.format(go=go))
    small = ["cluster.mem_gb=1", "cluster.tasks_per_node=1"]
    site.run("toolkit", "submit", "first.py", *small, cwd=project)
    first = site.find("first")
    # The second run tells what it finds of the first one's result when it starts.
    command = ["cp", str(first.path / "result.json"), str(seen)]
    site.run("toolkit", "exec", "--name=second", "--after=first", *small, "--", *command, cwd=project)
    second, job = site.find("second"), site.job_of(first)
    state, waits_for = dependency(site, second)
    assert (state, job in waits_for) == ("PENDING", True)
    reached(first, 5)
    # Its job starts too early, as after a job whose run a follow-up job has taken over: it gives its node back.
    site.box.run(["scontrol", "update", f"JobId={site.job_of(second)}", "Dependency="])
    wait_for(lambda: "back into the queue" in log_of(second), START_S, "the second run, which goes back")
    wait_for(lambda: job in dependency(site, second)[1], START_S, "its dependency")
    site.preempt()
    wait_for(lambda: first.attempts(), START_S, "the preemption")
    go.touch()
    wait_for(lambda: second.result() is not None, END_S, "the end of both")
    assert [attempt.cause for attempt in first.attempts()] == ["preempted", "completed"]
    assert second.result().state == "completed"
    assert len(second.attempts()) == 1, "that it had waited is no attempt"
    assert '"state": "completed"' in seen.read_text()


@pytest.mark.soak
def test_the_elements_of_an_array_go_back_behind_the_run_that_they_wait_for(site: Site) -> None:
    project, go = site.project(), site.folder / "go"
    (project / "first.py").write_text(FIRST.format(go=go))
    (project / "points.py").write_text(FIRST.format(go=go))
    small = ["cluster.mem_gb=1", "cluster.tasks_per_node=1"]
    site.run("toolkit", "submit", "first.py", *small, cwd=project)
    first = site.find("first")
    job = site.job_of(first)
    site.run("toolkit", "sweep", "points.py", "train.seed=0..1", *small, "--after=first", cwd=project)
    (array,) = site.runs.glob(".sweeps/points/arrays/*.json")
    array_job = json.loads(array.read_text())["job_id"]
    reached(first, 5)
    site.box.run(["scontrol", "update", f"JobId={array_job}", "Dependency="])

    def waiting() -> int:
        text = site.run("scontrol", "show", "job", array_job)
        return len(re.findall(rf"JobState=PENDING .*Dependency=afterany:{job}\b", text))

    logs = lambda: [path.read_text() for path in site.runs.glob("points/*/logs/supervisor.log")]  # noqa: E731
    wait_for(lambda: sum("back into the queue" in log for log in logs()) == 2, START_S, "both elements, which go back")
    wait_for(lambda: waiting() == 2, START_S, "their dependencies")
    assert f"waits until run first/{first.id} has completed" in site.run("toolkit", "sweep", "status", "points")
    go.touch()
    wait_for(lambda: len(list(site.runs.glob("points/*/result.json"))) == 2, END_S, "the end of all")
    ends = [json.loads(path.read_text()) for path in site.runs.glob("points/*/result.json")]
    assert [end["state"] for end in ends] == ["completed", "completed"]
    assert [end["attempts"] for end in ends] == [1, 1]
    assert [log.count("back into the queue") for log in logs()] == [1, 1], "they started when it was their turn"
    assert first.result().state == "completed"


def log_of(run: RunDir) -> str:
    path = Path(run.logs / "supervisor.log")
    return path.read_text() if path.exists() else ""
