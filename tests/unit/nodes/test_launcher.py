"""The processes and environments that the agents are ordered to start."""

from contextlib import nullcontext
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

from toolkit.files import rundir
from toolkit.nodes.allocation import Allocation
from toolkit.nodes.start.launcher import MODULE, AgentLauncher

ALLOCATION = Allocation(("node1", "node2", "node3"), (2, 2, 1), 4, job_id="7")


def environments(folder: Path, allocation: Allocation, environ: dict[str, str]) -> list[dict[str, str]]:
    """Return what each rank's order adds to the environment of its agent, by rank."""
    calls = {"listen": lambda *_, **__: None, "ensure": lambda _: None}
    agents: Any = SimpleNamespace(lock=nullcontext(), hosts=(), environ=environ, reports_token="1", **calls)
    launcher = AgentLauncher(rundir.create("test", folder), allocation, agents)
    command = [*MODULE, "toolkit", "run"]
    launcher.listen(command, environ, SimpleQueue())
    store: Any = launcher.start_store(1, allocation.world_size, "node1", environ)
    step: Any = launcher.start(1, allocation, command, environ, store)
    orders = [step.orders[host] for host in allocation.hosts]
    return [{**order.environ, **process.environ} for order in orders for process in order.processes]


def test_each_rank_is_told_what_srun_would_tell_a_task(tmp_path: Path) -> None:
    """The agents' environment may have the same variables. Those describe the step of the agents, and not the ranks."""
    ranks = environments(tmp_path, ALLOCATION, {"SLURM_NTASKS": "5", "SLURM_TASKS_PER_NODE": "2(x2),1"})
    assert [rank["SLURM_PROCID"] for rank in ranks] == [rank["RANK"] for rank in ranks] == [*"01234"]
    assert [rank["SLURM_LOCALID"] for rank in ranks] == [*"01010"]
    assert [rank["SLURM_NODEID"] for rank in ranks] == [*"00112"]
    assert [rank["SLURM_GTIDS"] for rank in ranks] == ["0,1", "0,1", "2,3", "2,3", "4"]
    common = {
        "SLURM_NTASKS": "5",
        "SLURM_NPROCS": "5",
        "SLURM_STEP_NUM_TASKS": "5",
        "SLURM_NNODES": "3",
        "SLURM_STEP_NUM_NODES": "3",
        "SLURM_TASKS_PER_NODE": "2(x2),1",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
        "SLURM_STEP_NODELIST": "node[1-3]",
        "SLURM_CPUS_PER_TASK": "4",
    }
    assert all(common.items() <= rank.items() for rank in ranks)


def test_without_slurm_nothing_is_told_of_it(tmp_path: Path) -> None:
    (rank,) = environments(tmp_path, Allocation(("here",), (1,), 1), {})
    assert not any(name.startswith("SLURM_") for name in rank)
