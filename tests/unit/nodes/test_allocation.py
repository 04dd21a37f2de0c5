"""The size of an allocation from the batch script's variables (recorded on Slurm 22.05)."""

import pytest

from toolkit.base.errors import RequestError
from toolkit.config import ClusterConfig
from toolkit.nodes.allocation import Allocation
from toolkit.plugins.testing.fake_slurm import FakeSlurm
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
    assert allocation.step_groups(allocation.hosts) == [["node1", "node2"], ["node3"], ["node4"]]
    assert allocation.gres(["node1", "node2"]) == "gpu:4,scratch:10"
    assert allocation.gres(["node1", "node3"]) == "gpu:2,scratch:10"
    assert allocation.gres(["node4"]) == "scratch:10"
    assert allocation.on(["node3", "node1"]).gpus == (2, 4)
    slurm.is_up = False
    assert Allocation.slurm(environ, slurm).gpus == (4, 4, 4, 4)
    assert Allocation.slurm(BATCH, slurm).gres(["node1"]) is None


def test_nodes_with_other_types_of_gpus_are_a_step_of_their_own() -> None:
    slurm, environ = FakeSlurm(), {**BATCH, "SLURM_GPUS_ON_NODE": "4", "SLURM_JOB_GPUS": "0,1,2,3"}
    types = {"node1": "gpu:a:2,gpu:b:2", "node2": "gpu:a:2,gpu:b:2", "node3": "gpu:a:4", "node4": "gpu:b:1"}
    slurm.gpus = JobGpus({"node1": 4, "node2": 4, "node3": 4, "node4": 1}, types_of_host=types)
    allocation = Allocation.slurm(environ, slurm)
    groups = allocation.step_groups(allocation.hosts)
    assert [(group, allocation.gres(group)) for group in groups] == [
        (["node1", "node2"], "gpu:a:2,gpu:b:2"),
        (["node3"], "gpu:a:4"),
        (["node4"], "gpu:b:1"),
    ]
    assert allocation.gres(allocation.hosts) == "gpu:1"
    slurm.gpus = JobGpus(dict.fromkeys(types, 0), ("shard:2",), are_asked=False)
    assert Allocation.slurm(environ, slurm).gres(["node1"]) == "shard:2"


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


#: Of a batch script on Slurm 24.11: one node with two tasks, and two nodes with one task each.
HET = {
    "SLURM_JOB_ID": "1",
    "SLURM_CLUSTER_NAME": "box",
    "SLURM_HET_SIZE": "2",
    "SLURM_PROCID": "0",
    "SLURM_CPUS_ON_NODE": "4",
    "SLURM_CPUS_PER_TASK_HET_GROUP_0": "2",
    "SLURM_JOB_CPUS_PER_NODE": "4",
    "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_0": "4",
    "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_1": "1(x2)",
    "SLURM_JOB_ID_HET_GROUP_0": "1",
    "SLURM_JOB_ID_HET_GROUP_1": "2",
    "SLURM_JOB_NODELIST": "node1",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "node1",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "node[2-3]",
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_JOB_NUM_NODES_HET_GROUP_0": "1",
    "SLURM_JOB_NUM_NODES_HET_GROUP_1": "2",
    "SLURM_JOB_PARTITION": "fast",
    "SLURM_JOB_PARTITION_HET_GROUP_0": "fast",
    "SLURM_JOB_PARTITION_HET_GROUP_1": "slow",
    "SLURM_NNODES": "1",
    "SLURM_NPROCS": "2",
    "SLURM_NTASKS": "2",
    "SLURM_NTASKS_PER_NODE_HET_GROUP_0": "2",
    "SLURM_NTASKS_PER_NODE_HET_GROUP_1": "1",
    "SLURM_TASKS_PER_NODE": "2",
    "SLURM_TASKS_PER_NODE_HET_GROUP_0": "2",
    "SLURM_TASKS_PER_NODE_HET_GROUP_1": "1(x2)",
}


def test_ranks_fill_one_component_after_the_other_and_each_has_its_own_steps() -> None:
    job = Allocation.slurm(HET)
    assert (job.job_id, job.cpus_per_task, job.components) == ("1", 1, (0, 1, 1))
    assert job.ranks_of == {"node1": range(2), "node2": range(2, 3), "node3": range(3, 4)}
    assert job.cpus_of == {"node1": 2, "node2": 1, "node3": 1}
    assert job.step_groups(["node3", "node1", "node2"]) == [["node3", "node2"], ["node1"]]
    assert [job.step_options([host]) for host in ("node1", "node3")] == [["--het-group=0"], ["--het-group=1"]]
    assert Allocation.slurm(BATCH).step_options(["node1"]) == []
    assert job.on(["node3", "node1"]).components == (1, 0)


def test_the_components_of_the_job_in_which_this_one_was_submitted_are_not_ours() -> None:
    """sbatch hands on all variables."""
    left = {name: value for name, value in HET.items() if "HET" in name}
    assert Allocation.slurm({**left, **BATCH, "SLURM_JOB_ID": "7"}) == Allocation.slurm({**BATCH, "SLURM_JOB_ID": "7"})


def test_each_component_has_its_own_gpus_and_what_else_it_asked_for() -> None:
    slurm = FakeSlurm()
    slurm.gpus = JobGpus({"node1": 4, "node2": 0, "node3": 0}, ("scratch:10", "nic:1"))
    job = Allocation.slurm(HET, slurm)
    assert [job.gres([host]) for host in job.hosts] == ["gpu:4,scratch:10", "nic:1", "nic:1"]


def test_the_config_of_a_run_keeps_the_components_for_a_resume() -> None:
    job, size = Allocation.slurm(HET), {"tasks_per_node": 1, "cpus_per_task": 1, "gpus_per_node": 0}
    first = {"partition": "fast", "nodes": 1, "tasks_per_node": 2, "cpus_per_task": 2, "gpus_per_node": 0}
    assert job.as_asked([]) == [first, {"partition": "slow", "nodes": 2, **size}]
    asked = [{}, {"partition": "slow,slower", "mem_gb": 4, "nodes": 9}]
    assert job.without_spares(1).as_asked(asked)[1] == {"partition": "slow,slower", "mem_gb": 4, "nodes": 1, **size}
    assert Allocation.slurm(BATCH).as_asked([{}, {}]) == []


def test_spares_are_of_the_commonest_kind_or_refused() -> None:
    job = Allocation.slurm(HET)
    assert job.without_spares(1).hosts == ("node1", "node2")
    with pytest.raises(RequestError, match=r"cluster\.spare_nodes: 2 .* 2,1,1 tasks"):
        job.without_spares(2)


def test_several_nodes_without_slurm_are_refused() -> None:
    with pytest.raises(RequestError, match=r"cluster\.nodes"):
        Allocation.local(ClusterConfig(nodes=2))
    with pytest.raises(RequestError, match=r"cluster\.components"):
        Allocation.local(ClusterConfig(components=[{}, {}]))
