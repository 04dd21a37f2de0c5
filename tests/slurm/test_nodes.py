"""Nodes that die or are cut off, and a killed supervisor.

Runs have spares, may continue with fewer nodes, or neither.

CI runs a sample; ``make soak`` all of them, on every Slurm version and profile.
"""

import itertools
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.slurm.site import END_S, START_S, Site, attempts_of, nothing_lost, pid_of_supervisor, reached
from tests.slurm.test_faults import tensors
from tests.slurm.test_stop import completed, slow_project, submit
from tests.waiting import wait_for
from toolkit.base import hostlist
from toolkit.files.run_files import AttemptRecord
from toolkit.files.rundir import RunDir

pytestmark = [pytest.mark.slurm, pytest.mark.sample(1)]

STEPS = 400
SPARE = ("cluster.nodes=2", "cluster.spare_nodes=1")
FEWER = ("cluster.nodes=2", "retry.allow_fewer_nodes=true")
NEITHER = ("cluster.nodes=2",)


def start(site: Site, *overrides: str) -> RunDir:
    """A run that has saved step 20 at the least and will take a while."""
    run = submit(site, slow_project(site, 0.02), f"train.max_steps={STEPS}", "checkpoint.every_steps=20", *overrides)
    reached(run, 50)
    return run


@contextmanager
def killed(site: Site, node: str) -> Iterator[float]:
    """Keep ``node`` dead in the block. Yield the time of its death; afterwards it is back and idle."""
    site.box.kill_node(node)
    try:
        yield time.time()
    finally:
        site.box.start_node(node)
        site.box.wait_idle(120)


def ended_as_undisturbed(site: Site, run: RunDir) -> list[AttemptRecord]:
    """Return the attempts of a completed run. Each must have gone on from a checkpoint of the one before."""
    result = completed(site, run)
    assert result.step == STEPS
    assert run.status().progress.step == STEPS
    attempts = run.attempts()
    for before, after in itertools.pairwise(attempts):
        assert (before.step_end or 0) - 40 <= (after.step_start or 0) <= (before.step_end or 0) + 40
    print(*(json.dumps([a.cause, a.decision, a.nodes, a.step_end, a.line]) for a in attempts), sep="\n")
    return attempts


def first_new_step(run: RunDir, since: float) -> float:
    """Seconds from ``since`` until the run gains steps in its second attempt."""

    def training() -> bool:
        status = run.status()
        progress = status.progress
        return status.attempt == 2 and run.step() > (10**9 if progress.step_start is None else progress.step_start)

    wait_for(training, END_S, "a step of the second attempt")
    return time.time() - since


def jobs_of(run: RunDir) -> set[tuple[str, int]]:
    return {(a.job_id, a.restart_count) for a in run.attempts()}


def attempts_without(site: Site, run: RunDir, node: str) -> list[AttemptRecord]:
    """Kill a node; return the attempts of the run, which ends as if undisturbed."""
    with killed(site, node) as since:
        print(f"first new step after {first_new_step(run, since):.1f} s")
        return ended_as_undisturbed(site, run)


def test_a_spare_stands_in_for_a_dead_node(site: Site) -> None:
    run = start(site, *SPARE)
    first, last = attempts_without(site, run, "node2")
    assert (first.cause, first.decision, first.lost_nodes) == ("node_failure", "restart", ("node2",))
    assert last.nodes == ("node1", "node3")
    assert len(jobs_of(run)) == 1
    assert "node2" in site.run("toolkit", "why", run.id)


@pytest.mark.soak
def test_with_fewer_nodes_allowed_the_run_goes_on_with_those_that_are_left(site: Site) -> None:
    run = start(site, *FEWER)
    first, last = attempts_without(site, run, "node2")
    assert (first.cause, first.decision) == ("node_failure", "restart")
    assert (last.nodes, last.world_size) == (("node1",), 1)
    assert len(jobs_of(run)) == 1


@pytest.mark.parametrize(
    ("how", "node"),
    [
        pytest.param(SPARE, "node1", id="the batch host, spare"),
        pytest.param(FEWER, "node1", id="the batch host, fewer", marks=pytest.mark.soak),
        pytest.param(NEITHER, "node1", id="the batch host, neither", marks=pytest.mark.soak),
        pytest.param(NEITHER, "node2", id="neither", marks=pytest.mark.soak),
    ],
)
def test_a_job_without_batch_host_or_spare_is_requeued_and_its_run_goes_on(
    site: Site, how: tuple[str, ...], node: str
) -> None:
    run = start(site, *how)
    first, last = attempts_without(site, run, node)
    assert (first.cause, first.decision) == ("node_failure", "requeue")
    assert node not in last.nodes
    assert last.restart_count == 1


@pytest.mark.soak
def test_a_dead_spare_is_no_matter(site: Site) -> None:
    run = start(site, *SPARE)
    with killed(site, "node3"):
        (only,) = ended_as_undisturbed(site, run)
    assert only.nodes == ("node1", "node2")


@contextmanager
def without_runs_folder(site: Site, node: str) -> Iterator[None]:
    """``node`` sees an empty folder in the place of the runs' folder."""
    site.run("mkdir", "-p", str(site.runs))
    site.box.run(["mount", "-t", "tmpfs", "tmpfs", str(site.runs)], node=node)
    try:
        yield
    finally:
        site.box.run(["umount", "-l", str(site.runs)], node=node)


@pytest.mark.parametrize("how", [SPARE, pytest.param(NEITHER, marks=pytest.mark.soak)], ids=["spare", "neither"])
def test_a_node_that_cannot_start_ranks_is_used_no_more(site: Site, how: tuple[str, ...]) -> None:
    """Slurm cannot open the ranks' output there. Its srun ends with exit code 0."""
    with without_runs_folder(site, "node2"):
        run = submit(site, slow_project(site, 0.0), "train.max_steps=20", "cluster.preflight=false", *how)
        assert completed(site, run).step == 20
    first, last = run.attempts()
    assert (first.cause, first.lost_nodes) == ("node_failure", ("node2",))
    assert "rank 1 on node2: could not be started" in first.line
    assert "node2" not in last.nodes


@contextmanager
def without_torch(site: Site, node: str) -> Iterator[None]:
    """On ``node`` a library of torch is empty, as on a damaged disk."""
    library = Path(torch.__file__).resolve().parent / "lib" / "libtorch_global_deps.so"
    site.box.run(["mount", "--bind", "/dev/null", str(library)], node=node)
    try:
        yield
    finally:
        site.box.run(["umount", "-l", str(library)], node=node)


def test_a_node_that_cannot_import_torch_is_used_no_more_also_without_a_spare(site: Site) -> None:
    with without_torch(site, "node2"):
        run = submit(site, slow_project(site, 0.0), "train.max_steps=20", *NEITHER)
        assert completed(site, run).step == 20
    first, last = run.attempts()
    assert (first.cause, first.decision, first.lost_nodes) == ("node_failure", "requeue", ("node2",)), first.line
    assert first.line.startswith("rank 1 on node2: ConfigError: job: "), first.line
    assert "node2" not in last.nodes


def test_a_batch_host_that_cannot_start_the_job_is_named_with_what_to_do(site: Site) -> None:
    """Slurm 22.05 cannot start such a job. 24.11 starts it where the run has no folder. Both end it for good."""
    with without_runs_folder(site, "node1"):
        run = submit(site, slow_project(site, 0.0), "train.max_steps=20")
        assert site.box.wait_job(site.job_of(run), 180)["ExitCode"] in ("0:53", "1:0")
        advice = f"toolkit resume {run.id} cluster.exclude=node1"
        assert advice in site.run("toolkit", "status", run.id)
        assert advice in site.run("toolkit", "why", run.id)
        site.run(*advice.split())
        assert completed(site, run).step == 20
    assert "node1" not in run.attempts()[0].nodes


@contextmanager
def drained(site: Site, node: str, reason: str) -> Iterator[None]:
    site.box.run(["scontrol", "update", f"nodename={node}", "state=drain", f"reason={reason}"])
    try:
        yield
    finally:
        site.box.run(["scontrol", "update", f"nodename={node}", "state=resume"])


def test_a_drained_node_is_left_for_a_spare_and_without_a_spare_it_is_named(site: Site) -> None:
    """Of two runs at a time, one moves to a spare and one stays. The bits at their ends are equal."""
    project = slow_project(site, 0.02, late_s=0.5)
    common = [f"train.max_steps={STEPS}", "cluster.time_min=30", "checkpoint.memory_every_steps=1"]
    site.run("toolkit", "submit", "slow.yaml", "name=moves", *SPARE, *common, nodes("node[1-3]"), cwd=project)
    site.run("toolkit", "submit", "slow.yaml", "name=stays", *NEITHER, *common, nodes("node[2,4]"), cwd=project)
    moves, stays = site.find("moves"), site.find("stays")
    reached(moves, 5)
    reached(stays, 5)
    with drained(site, "node2", "new fan, please"):
        # After its first attempt the job gives node2 back to Slurm.
        attempts_of(moves, 1)
        job = site.job_of(moves)
        wait_for(lambda: hosts_of(site, job) == ["node1", "node3"], 30, "Slurm to have node2 back")
        named = "drained: new fan, please by root"
        assert f"node2 is not used: {named}" in site.run("toolkit", "status", moves.id)
        wait_for(lambda: f"node node2: {named}" in site.run("toolkit", "status", stays.id), 120, "its name")
        assert completed(site, moves).step == completed(site, stays).step == STEPS
    first, last = moves.attempts()
    nothing_lost(moves)
    assert (first.cause, first.decision, first.vacated_nodes) == ("moved", "restart", ("node2",))
    assert first.line.startswith(f"moved off node2: {named}; stopped at step {first.step_end}, committed")
    assert (first.nodes, last.nodes) == (("node1", "node2"), ("node1", "node3"))
    assert first.line in site.run("toolkit", "why", moves.id)
    (only,) = stays.attempts()
    assert only.nodes == ("node2", "node4")
    assert f"node node2: {named}" in site.run("toolkit", "why", stays.id)
    assert tensors(moves, STEPS) == tensors(stays, STEPS)


@pytest.mark.soak
def test_a_job_that_gave_a_node_back_survives_its_supervisor_and_requeues_in_full(
    site: Site,
) -> None:
    run = submit(site, slow_project(site, 0.05), "train.max_steps=6000", "cluster.time_min=60", *SPARE)
    reached(run, 5)
    job = site.job_of(run)

    def works_in_attempt(number: int) -> bool:
        status = run.status()
        return status.attempt == number and status.state == "running"

    with drained(site, "node2", "new fan, please"):
        wait_for(lambda: works_in_attempt(2), END_S, "the second attempt")
        assert hosts_of(site, job) == ["node1", "node3"]
        dead = run.status().pid
        os.kill(pid_of_supervisor(site, run), signal.SIGKILL)
        wait_for(lambda: run.status().pid != dead, START_S, "another supervisor")
        # It takes the ranks over, or starts others where one had not come so far.
        wait_for(lambda: run.status().state == "running", END_S, "ranks that work")
        assert run.status().nodes == ("node1", "node3")
    last = run.status().attempt
    assert last is not None
    site.run("scontrol", "requeue", job)
    wait_for(lambda: works_in_attempt(last + 1), END_S, "the attempt after the requeue")
    assert len(hosts_of(site, job)) == 3
    site.run("toolkit", "stop", run.id)
    wait_for(run.result, END_S, "a result")
    assert [a.cause for a in run.attempts() if a.cause != "crashed"] == ["moved", "preempted", "stopped"]


def nodes(node_list: str) -> str:
    return f"cluster.extra={json.dumps({'nodelist': node_list})}"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_state_in_memory_saves_the_steps_of_a_killed_rank_and_of_a_dead_node(site: Site, strategy: str) -> None:
    """Nothing is on the disk before the end. What a spare starts from is in the memory of the other node."""
    in_memory = ("checkpoint.memory_every_steps=1", "checkpoint.every_steps=100000")
    run = start(site, *SPARE, *in_memory, "cluster.tasks_per_node=2", f"strategy.name={strategy}")
    since = time.time()
    os.kill(site.ranks()[0], signal.SIGKILL)
    print(f"first new step after {first_new_step(run, since):.1f} s")
    reached(run, run.status().progress.step + 50)
    with killed(site, "node2"):
        first, second, last = ended_as_undisturbed(site, run)
    assert second.step_start >= first.step_end - 1  # the last report may be older than the last step
    assert (second.cause, second.decision) == ("node_failure", "restart")
    assert last.step_start >= second.step_end - 2  # and the last copy may not have come to the partner
    assert last.nodes == ("node1", "node3")
    assert all("resuming from memory" in run.rank_log(attempt, 0).read_text() for attempt in (2, 3))


@pytest.mark.parametrize(
    "node", [pytest.param("node2", id="a rank's", marks=pytest.mark.soak), pytest.param("node1", id="the batch host")]
)
def test_a_node_that_is_cut_off_and_comes_back_splits_no_run(site: Site, node: str) -> None:
    run = start(site, *SPARE)
    site.box.cut_node(node)
    since = time.time()
    try:
        print(f"first new step after {first_new_step(run, since):.1f} s")
    finally:
        site.box.join_node(node)
    attempts = ended_as_undisturbed(site, run)
    assert node not in attempts[-1].nodes
    assert [a.attempt for a in attempts] == list(range(1, len(attempts) + 1))
    wait_for(lambda: not site.processes(), 60, "no process of ours on any node")
    site.box.wait_idle(120)


@pytest.mark.soak
def test_a_link_that_flaps_costs_no_node(site: Site) -> None:
    """By the real network. `tests/soak/test_dead_nodes_simulation.py` plays many more of them."""
    run = start(site, *SPARE, "train.max_steps=100000")
    for node, seconds in itertools.product(("node2", "node3"), (0.5, 1.2, 1.8)):
        site.box.cut_node(node)
        time.sleep(seconds)
        site.box.join_node(node)
        reached(run, run.step() + 50)
    assert run.status().attempt == 1
    site.run("toolkit", "stop", run.id)
    wait_for(run.result, END_S, "a result")
    assert [attempt.cause for attempt in run.attempts()] == ["stopped"]


@pytest.mark.soak
def test_a_batch_host_that_returns_as_slurm_gives_it_up_leaves_no_orphaned_job(site: Site) -> None:
    """The node's slurmd then ends its part of the job. An srun there would end the agents' step on other nodes."""
    run = start(site, *SPARE)
    job, since = site.job_of(run), time.time()
    site.box.cut_node("node1")
    try:
        wait_for(lambda: "node1" not in hosts_of(site, job), 120, "Slurm to give node1 up")
    finally:
        site.box.join_node("node1")
    print(f"first new step after {first_new_step(run, since):.1f} s")
    attempts = ended_as_undisturbed(site, run)
    assert "node1" not in attempts[-1].nodes


def hosts_of(site: Site, job: str) -> list[str]:
    return hostlist.expand(site.box.job(job)["NodeList"])


def is_another(run: RunDir, pid: int) -> bool:
    """The supervisor is no longer the one with ``pid``."""
    return run.status().pid != pid


def test_a_killed_supervisor_costs_no_step_that_is_in_memory_also_in_a_requeued_job(site: Site) -> None:
    run = start(site, *SPARE, "checkpoint.memory_every_steps=1")
    for _ in range(2):
        ranks = site.ranks()
        before = run.status()
        os.kill(pid_of_supervisor(site, run), signal.SIGKILL)
        since = time.time()
        wait_for(partial(is_another, run, before.pid), 30, "another supervisor")
        reached(run, before.progress.step + 25)
        print(f"25 more steps {time.time() - since:.1f} s after the supervisor's death")
        assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
        assert run.status().progress.step_start >= before.progress.step
        killed = run.attempts()[-1]
        assert (killed.cause, killed.decision, killed.nodes) == ("crashed", "restart", ("node1", "node2"))
        assert "was killed by SIGKILL" in killed.line
    site.run("scontrol", "requeue", site.job_of(run))
    *_, third, last = ended_as_undisturbed(site, run)
    assert (third.cause, last.restart_count) == ("preempted", 1)
