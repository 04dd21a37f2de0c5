"""Ranks that hang on a real Slurm: the one behind is named with its node.

The run completes in its job. ``tests/dist/test_local_hangs.py`` tests that the result is an undisturbed run's.
"""

import os
import re
import signal
from collections.abc import Callable

import pytest

from tests import hangs
from tests.slurm.site import END_S, Site, reached
from tests.slurm.test_stop import completed
from tests.waiting import wait_for
from toolkit import hang
from toolkit.files.rundir import RunDir

pytestmark = [pytest.mark.slurm, pytest.mark.sample(1)]

#: Half of it is the bound, 0.8 of it until the first step has ended: imports of torch on busy cores.
TIMEOUT_S = 60
NODES = ("node1", "node2", "node3")


def submit(site: Site, kind: str, *overrides: str) -> RunDir:
    """One rank on each of three nodes."""
    project = site.folder / "project"
    hangs.write_project(project, kind)
    size = [f"cluster.nodes={len(NODES)}", "cluster.tasks_per_node=1", f"dist.timeout_s={TIMEOUT_S}"]
    site.run("toolkit", "submit", "hangs.yaml", *size, *overrides, cwd=project)
    return site.only_run()


def hangs_itself(site: Site, run: RunDir) -> int:
    wait_for(lambda: list(run.path.glob("hung-*")), END_S, "a rank that hangs")
    return hangs.hung_rank(run.path)


def is_stopped(site: Site, run: RunDir) -> int:
    reached(run, 100)  # by then each rank has reported
    os.kill(site.ranks("node2")[0], signal.SIGSTOP)
    return NODES.index("node2")


STORIES: dict[str, tuple[str, list[str], Callable[[Site, RunDir], int], str]] = {
    "endless loader": ("sample", [], hangs_itself, "waiting for data"),
    "deadlocked worker": ("sample", ["data.workers=1"], hangs_itself, "waiting for data"),
    "collective never entered": ("collective", [], hangs_itself, "in a step"),
    "stopped": ("none", ["train.max_steps=1000"], is_stopped, "does not answer (stopped, or its node is gone)"),
}


@pytest.mark.parametrize(
    "story", [pytest.param(name, marks=[] if name == "deadlocked worker" else pytest.mark.soak) for name in STORIES]
)
def test_the_rank_that_is_behind_is_named_with_its_node_and_the_run_completes(site: Site, story: str) -> None:
    kind, overrides, act, doing = STORIES[story]
    run = submit(site, kind, *overrides)
    rank = act(site, run)
    completed(site, run, END_S)
    hung, after = run.attempts()
    assert (hung.cause, hung.decision, after.cause) == ("hang", "restart", "completed")
    named = hung.first_failure
    assert (named.rank, named.host) == (rank, NODES[rank])
    # A rank may be stopped as the others gather what is logged.
    where = r"all_(?:reduce|gather_single)"
    told = re.fullmatch(rf"{re.escape(doing)}(?: \(hangs\.py:\d+\))?, (\d+) s; 2 others in {where}", named.how)
    assert told is not None, named
    assert int(told[1]) >= TIMEOUT_S / 2
    why = site.run("toolkit", "why", run.id, "--all")
    assert f"rank {rank} on {NODES[rank]}, attempt 1: {named.how}" in why
    assert ("in hang_for_ever" in why) == (story != "stopped")
    assert ("the stack of its data worker 0" in why) == (story == "deadlocked worker")
    answered = {r for r in range(3) if hang.stack_path(run.attempt_logs(1), r).exists()}
    assert answered == set(range(3)) - ({rank} if story == "stopped" else set())
    between_s = after.started - hung.ended
    print(f"{story}: {named.how}; next attempt after {between_s:.2f} s")
    assert site.box.job(site.job_of(run))["Restarts"] == "0"


#: Knows nothing of the toolkit. In the first attempt all ranks but rank 1 wait for a program that will not end.
SCRIPT = """
import os, subprocess, threading

def hang_for_ever():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    hang_for_ever() if os.environ["RANK"] == "1" else subprocess.run(["sleep", "1000"])
print("done")
"""
SILENCE_S = 16  #: half of it is the bound


def test_silent_ranks_of_a_script_on_several_nodes_are_named_and_started_again(site: Site) -> None:
    """Each node watches its own: those of this cluster see all processes of the machine. No rank imports torch."""
    project = site.project()
    (project / "script.py").write_text(SCRIPT)
    size = [f"cluster.nodes={len(NODES)}", "cluster.tasks_per_node=1", f"dist.timeout_s={SILENCE_S}"]
    site.run("toolkit", "submit", "script.py", *size, cwd=project)
    run = site.only_run()
    assert wait_for(run.result, END_S, "a result").state == "completed"
    hung, after = run.attempts()
    assert (hung.cause, hung.decision, after.cause) == ("hang", "restart", "completed")
    named = hung.first_failure
    assert (named.rank, named.host) == (1, NODES[1])
    assert re.fullmatch(r"silent \(script\.py:7\), \d+ s; 2 others silent \(script\.py:10\)", named.how), named
    texts = [hang.stack_path(run.attempt_logs(1), rank).read_text() for rank in range(3)]
    assert ["in hang_for_ever" in text for text in texts] == [False, True, False]
    assert ["sleep, S (sleeping)" in text for text in texts] == [True, False, True]
    assert [text.count("# process") for text in texts] == [3, 2, 3]  # its processes, and whose stack it is
    assert site.box.job(site.job_of(run))["Restarts"] == "0"
