"""The box itself: it is a cluster, can be broken, and leaves nothing behind."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.box import Box, BoxError, state
from tests.box.cluster import PROJECT
from tests.box.namespaces import CGROUPS, all_pids, find_inits, wait_for
from tests.slurm.conftest import BoxFactory

pytestmark = pytest.mark.slurm


def sinfo_states(box: Box) -> list[str]:
    return box.run(["sinfo", "--noheader", "--Node", "--partition=main", "--format=%N %T"]).stdout.splitlines()


def test_every_node_is_idle_after_up(box: Box) -> None:
    assert sinfo_states(box) == [f"{node} idle" for node in box.spec.node_names]


def test_srun_reaches_every_node(box: Box) -> None:
    seen = box.run(["srun", f"--nodes={box.spec.nodes}", "hostname"]).stdout.split()
    assert sorted(seen) == box.spec.node_names


def test_sacct_knows_a_finished_job(box: Box) -> None:
    job_id = box.run(["sbatch", "--parsable", "--output=/dev/null", "--wrap=true"]).stdout.strip()
    assert box.wait_job(job_id)["ExitCode"] == "0:0"
    asked = ["sacct", "--noheader", "--parsable2", "--allocations", "--format=State", f"--jobs={job_id}"]
    wait_for(lambda: box.run(asked).stdout.split() == ["COMPLETED"], 20, "the job in sacct", pause_s=0.2)


def test_pmix_numbers_the_ranks_of_two_nodes(box: Box) -> None:
    ranks = box.run(["srun", "--mpi=pmix", "--nodes=2", "--ntasks=4", "printenv", "PMIX_RANK"]).stdout.split()
    assert sorted(ranks) == ["0", "1", "2", "3"]


def test_machines_see_the_shared_folder_at_the_path_it_has_here(box: Box) -> None:
    script = f'hostname >"{box.shared}/seen-$(hostname)"'
    box.run(["srun", f"--nodes={box.spec.nodes}", "sh", "-c", script])
    assert {path.name for path in box.shared.glob("seen-*")} == {f"seen-{node}" for node in box.spec.node_names}


def test_ranks_run_the_python_of_the_tests(box: Box) -> None:
    assert box.run(["srun", "python", "-c", "import sys; print(sys.prefix)"]).stdout.strip() == sys.prefix


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_the_program_and_its_status_comes_back(box: Box, sent: signal.Signals) -> None:
    script = f"trap 'exit 75' {sent.name[3:]}; echo trapped; while :; do sleep 0.05; done"
    with box.popen(["bash", "-c", script], stdout=subprocess.PIPE) as program:
        assert program.stdout.readline() == "trapped\n"
        program.send_signal(sent)
        assert program.wait(timeout=10) == 75


def test_killing_the_group_leaves_no_child(box: Box) -> None:
    with box.popen(["bash", "-c", "sleep 600.25 & wait"]) as program:
        wait_for(lambda: running(box, "sleep 600.25"), 10, "the child to start")
        os.killpg(program.inner_pid, signal.SIGKILL)
    wait_for(lambda: not running(box, "sleep 600.25"), 10, "the child to end")


def test_orphans_are_reaped(box: Box) -> None:
    box.run(["bash", "-c", "(sleep 0.01 &)"])
    wait_for(lambda: "Z" not in box.run(["ps", "-eo", "stat="]).stdout, 10, "no zombie on the login side")


def test_processes_shows_what_a_job_runs_until_it_ends(box: Box) -> None:
    job_id = box.run(["sbatch", "--parsable", "--output=/dev/null", "--wrap=sleep 600.5"]).stdout.strip()
    wait_for(lambda: running(box, "sleep 600.5"), 20, "the job to start")
    box.run(["scancel", job_id])
    assert box.wait_job(job_id)["JobState"] == "CANCELLED"
    wait_for(lambda: not running(box, "sleep 600.5"), 20, "the job to end")


def test_a_killed_node_can_be_started_again(box: Box) -> None:
    """By a thread that ends before the node does, as well."""
    box.kill_node("node4")
    assert not reachable(box, "node4")
    starter = threading.Thread(target=box.start_node, args=["node4"])
    starter.start()
    starter.join()
    box.wait_idle()
    assert box.run(["srun", "--nodelist=node4", "hostname"]).stdout == "node4\n"


def test_a_node_that_slurm_has_drained_is_of_use_again(box: Box) -> None:
    box.run(["scontrol", "update", "nodename=node2", "state=drain", "reason=Kill task failed"])
    box.revive()
    assert box.run(["srun", "--nodelist=node2", "hostname"]).stdout == "node2\n"


def test_a_cut_node_runs_on_unreachable_until_it_is_joined(box: Box) -> None:
    box.cut_node("node3")
    assert not reachable(box, "node3")
    assert box.run(["hostname"], node="node3").stdout == "node3\n"
    box.join_node("node3")
    assert reachable(box, "node3")


def test_slurmctld_keeps_a_job_over_its_restart(box: Box) -> None:
    job_id = box.run(["sbatch", "--parsable", "--hold", "--wrap=true"]).stdout.strip()
    box.restart_slurmctld()
    assert box.job(job_id)["JobState"] == "PENDING"
    box.run(["scancel", job_id])


def test_accounting_can_be_away(box: Box) -> None:
    box.stop_slurmdbd()
    assert box.run(["sacct"], check=False).returncode != 0
    box.start_slurmdbd()
    assert box.run(["sacct"]).returncode == 0


def test_slow_network_can_be_set_and_taken_back(box: Box) -> None:
    box.slow_network("100mbit")
    assert "rate 100Mbit" in box.run(["tc", "qdisc", "show", "dev", "node1"]).stdout
    box.slow_network(None)
    assert "rate" not in box.run(["tc", "qdisc", "show", "dev", "node1"]).stdout


def test_a_daemon_that_does_not_start_says_why(box: Box) -> None:
    with pytest.raises(BoxError, match=r"(?s)slurmctld on login.*Nowhere"):
        Box(nodes=1, slurm=box.spec.slurm, topology="Nowhere=node1\n").up()


def test_two_boxes_stand_side_by_side(box: Box, make_box: BoxFactory) -> None:
    other = make_box(nodes=1)
    assert other.run(["srun", "hostname"]).stdout == box.run(["srun", "--nodelist=node1", "hostname"]).stdout
    for each in (box, other):
        known = each.run(["sacctmgr", "--noheader", "--parsable2", "show", "cluster", "format=Cluster"]).stdout
        assert known.split() == [each.spec.name]


def test_down_leaves_nothing_on_the_machine(box: Box, make_box: BoxFactory) -> None:
    before = machine_traces()
    other = make_box(nodes=2, profile=box_profile())
    other.run(["sbatch", "--nodes=2", "--output=/dev/null", "--wrap=srun sleep 600.75"])
    wait_for(lambda: running(other, "sleep 600.75"), 20, "the job to start")
    alive = {*find_inits(other.box_dir).values(), *(pid for pid, _ in other.processes())}
    assert len(alive) > 3
    other.down()
    assert not alive & set(all_pids())
    assert machine_traces() == before
    assert not other.box_dir.exists()
    assert not list(CGROUPS.glob(f"*/{other.spec.name}"))


def test_a_box_dies_with_its_killed_owner_and_the_next_up_sweeps_it(box: Box, make_box: BoxFactory) -> None:
    script = "from tests.box import Box; b = Box(nodes=1); b.up(); print(b.spec.name, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=PROJECT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        box_dir = state.boxes_dir() / owner.stdout.readline().strip()
        assert find_inits(box_dir).keys() == {"login", "node1"}
        owner.kill()
    wait_for(lambda: not find_inits(box_dir), 10, "the machines to die")
    make_box(nodes=1, name=box_dir.name).run(["srun", "hostname"])


def test_strict_profile_binds_confines_and_counts_for_an_unprivileged_user(make_box: BoxFactory) -> None:
    box = make_box(nodes=2, profile="strict")
    confined = 'grep -c "freezer:.*/slurm_$(hostname)/uid_2000" /proc/self/cgroup'
    script = f'echo "$(id -un) $CUDA_VISIBLE_DEVICES $({confined})"'
    seen = box.run(["srun", "--nodes=2", "--gpus-per-node=1", "sh", "-c", script], user="alice", cwd=box.shared)
    assert seen.stdout.splitlines() == ["alice 0 1"] * 2


def test_slurm_24_11_runs_a_job_and_tells_its_end(make_box: BoxFactory) -> None:
    box = make_box(nodes=2, slurm="24.11")
    ends = box.run(["srun", "--nodes=2", "--time=5", "printenv", "SLURM_JOB_END_TIME"]).stdout.split()
    assert len(ends) == 2
    assert box.run(["srun", "--version"]).stdout.startswith("slurm-wlm 24.11")


@pytest.fixture(scope="module", autouse=True)
def _box_is_left_as_found(box: Box) -> Iterator[None]:
    yield
    box.wait_idle()


def box_profile() -> str:
    return "strict" if (CGROUPS / "freezer").is_dir() else "plain"


def running(box: Box, command: str) -> bool:
    """Whether this command runs somewhere in the box; srun starts it by its full path."""
    return any(line in (command, f"/usr/bin/{command}") for _, line in box.processes())


def reachable(box: Box, node: str) -> bool:
    """Whether the login side can open a connection to the node's slurmd within a second."""
    script = "import socket, sys; socket.create_connection((sys.argv[1], 6818), timeout=1)"
    return box.run([sys.executable, "-c", script, node], check=False).returncode == 0


def machine_traces() -> dict[str, object]:
    """Return the places where a box could leave something on the machine. Another user's box changes none of them."""
    links = subprocess.run(["ip", "-oneline", "link"], capture_output=True, text=True, check=True).stdout
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    names = [line.split(":")[1] for line in links.splitlines()]
    return {
        "mounts": Path("/proc/self/mounts").read_text(),
        "links": names,
        "netns": spaces,
        "host": socket.gethostname(),
    }
