"""The size of an allocation from the batch script's variables (recorded on Slurm 22.05)."""

from __future__ import annotations

import pytest

from toolkit.base.errors import RequestError
from toolkit.config import ClusterConfig
from toolkit.nodes.allocation import Allocation
from toolkit.slurm.fake import FakeSlurm
from toolkit.slurm.jobs import JobGpus

BATCH = {
    "SLURM_JOB_ID": "12",
    "SLURM_JOB_NODELIST": "node[1-4]",
    "SLURM_TASKS_PER_NODE": "2(x3),1",
    "SLURM_JOB_CPUS_PER_NODE": "4(x4)",
    "SLURM_CLUSTER_NAME": "box",
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "7",
}


def test_uneven_tasks_fill_one_node_after_the_other() -> None:
    allocation = Allocation.slurm(BATCH)
    assert allocation.world_size == 7
    assert allocation.rank_hosts == ["node1", "node1", "node2", "node2", "node3", "node3", "node4"]
    assert allocation.ranks_of == {"node1": range(2), "node2": range(2, 4), "node3": range(4, 6), "node4": range(6, 7)}


def test_cpus_are_those_asked_for_or_an_even_share() -> None:
    assert Allocation.slurm({**BATCH, "SLURM_CPUS_PER_TASK": "3"}).cpus_per_task == 3
    assert Allocation.slurm(BATCH).cpus_per_task == 2


def test_gpus_are_each_nodes_own_and_this_nodes_where_slurm_does_not_say() -> None:
    slurm, environ = FakeSlurm(), {**BATCH, "SLURM_GPUS_ON_NODE": "4", "SLURM_JOB_GPUS": "0,1,2,3"}
    slurm.gpus = JobGpus({"node1": 4, "node2": 4, "node3": 2, "node4": 0}, ("scratch:10",))
    allocation = Allocation.slurm(environ, slurm)
    assert (allocation.gpus, allocation.gpus_per_node) == ((4, 4, 2, 0), 4)
    assert allocation.by_gpus(allocation.hosts) == [["node1", "node2"], ["node3"], ["node4"]]
    assert allocation.gres(["node1", "node2"]) == "gpu:4,scratch:10"
    assert allocation.gres(["node1", "node3"]) == "gpu:2,scratch:10"
    assert allocation.gres(["node4"]) == "scratch:10"
    assert allocation.on(["node3", "node1"]).gpus == (2, 4)
    slurm.is_up = False
    assert Allocation.slurm(environ, slurm).gpus == (4, 4, 4, 4)
    assert Allocation.slurm(BATCH, slurm).gres(["node1"]) is None


def test_tasks_of_each_gpu_are_where_the_gpus_are() -> None:
    """Slurm 22.05 names tasks by node that it has distributed by CPUs."""
    slurm = FakeSlurm()
    slurm.gpus = JobGpus({"node1": 1, "node2": 2, "node3": 2, "node4": 2})
    environ = {**BATCH, "SLURM_NTASKS_PER_GPU": "1", "SLURM_GPUS": "7", "SLURM_GPUS_ON_NODE": "1"}
    assert Allocation.slurm(environ, slurm).tasks == (1, 2, 2, 2)
    slurm.gpus = JobGpus({"node1": 4, "node2": 4, "node3": 4, "node4": 4})
    assert Allocation.slurm(environ, slurm).tasks == (2, 2, 2, 1)


def test_an_array_element_is_known_as_job_and_task() -> None:
    array = {**BATCH, "SLURM_ARRAY_JOB_ID": "11", "SLURM_ARRAY_TASK_ID": "3", "SLURM_RESTART_COUNT": "2"}
    allocation = Allocation.slurm(array)
    assert (allocation.job_id, allocation.job_key, allocation.restart_count) == ("11_3", "box-11_3", 2)


def test_contradicting_variables_are_shown() -> None:
    with pytest.raises(RequestError, match=r"SLURM_TASKS_PER_NODE=2 .* SLURM_JOB_NODELIST=node\[1-4\]"):
        Allocation.slurm({**BATCH, "SLURM_TASKS_PER_NODE": "2"})


def test_outside_an_allocation_the_door_says_where_to_go() -> None:
    with pytest.raises(RequestError, match="sbatch or salloc"):
        Allocation.slurm({})


def test_a_heterogeneous_job_is_refused_since_its_other_nodes_would_idle() -> None:
    with pytest.raises(RequestError, match=r"heterogeneous job of 2 components.*srun --het-group=0,1"):
        Allocation.slurm({**BATCH, "SLURM_HET_SIZE": "2"})
    assert Allocation.slurm({**BATCH, "SLURM_HET_SIZE": "1"}).world_size == 7


def test_several_nodes_without_slurm_are_refused() -> None:
    with pytest.raises(RequestError, match=r"cluster\.nodes"):
        Allocation.local(ClusterConfig(nodes=2))
