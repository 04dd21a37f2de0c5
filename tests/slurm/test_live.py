"""Requests to a training run of two nodes: its stacks, profiles. They survive the supervisor's death."""

import gzip
import json
import os
import re
import signal
import threading
from typing import Any

import pytest

from tests.slurm.site import END_S, START_S, Site, pid_of_supervisor, reached
from tests.slurm.test_stop import completed, slow_project, submit
from tests.waiting import wait_for
from toolkit.files.rundir import RunDir

pytestmark = [pytest.mark.slurm, pytest.mark.soak]

STEPS = 1200


def stacks(site: Site, run: RunDir) -> dict[str, Any]:
    said = site.run("toolkit", "stacks", run.id, "--json")
    found: dict[str, Any] = json.loads(said[said.index("{") :])
    return found


def test_two_nodes_answer_also_where_the_supervisor_is_killed_meanwhile(site: Site) -> None:
    project = slow_project(site, 0.04)
    source = (project / "jobs/slow.py").read_text().splitlines()
    line = next(number for number, text in enumerate(source, 1) if "time.sleep(" in text)
    in_memory = "checkpoint.memory_every_steps=1"
    run = submit(site, project, f"train.max_steps={STEPS}", "optim.schedule=constant", in_memory)
    reached(run, 50)

    # The ranks of both nodes, each at the line where it spends its time.
    def both_sleep() -> bool:
        groups = stacks(site, run)["groups"]
        assert sorted(rank for group in groups for rank in group["ranks"]) == [0, 1]
        here = re.compile(rf'/jobs/slow\.py", line {line}, in at')
        return all(any(here.search(frame) for frame in group["stack"]) for group in groups)

    wait_for(both_sleep, START_S, "both ranks in the pause of a step")
    assert f"jobs/slow.py:{line} at" in site.run("toolkit", "stacks", run.id)

    # A profile of the other node's rank: each of its steps is in it, with what torch has done there.
    said = site.run("toolkit", "profile", run.id, "--rank", "1", "--steps", "3")
    [path] = (run.path / "profiles").glob("*.json.gz")
    assert str(path) in said
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    first = int(path.name.split("-")[1])
    marked = {event["name"]: event for event in events if re.fullmatch(r"step \d+", event.get("name", ""))}
    assert {*marked} == {f"step {step}" for step in range(first, first + 3)}
    for event in marked.values():
        assert event["dur"] > 40_000, "the pause of 0.04 s, in microseconds"
    assert any("Backward" in event.get("name", "") for event in events)

    # Another one is asked for while the supervisor is stopped; the one in its place carries it out.
    supervisor, before = pid_of_supervisor(site, run), run.status().pid
    os.kill(supervisor, signal.SIGSTOP)
    answers: list[str] = []
    asking = threading.Thread(target=lambda: answers.append(site.run("toolkit", "profile", run.id)))
    asking.start()
    wait_for(lambda: list((run.path / "requests").glob("*.json")), START_S, "the request")
    os.kill(supervisor, signal.SIGKILL)
    asking.join(END_S)
    assert len(list((run.path / "profiles").glob("*.json.gz"))) == 2, answers
    wait_for(lambda: run.status().pid not in (None, before), START_S, "another supervisor")
    completed(site, run)
    assert "has ended (completed)" in site.run("toolkit", "stacks", run.id, check=False)
