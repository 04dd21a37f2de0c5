"""Recorded environments in, placements out. Of the launchers' variables only those that are read are kept."""

from typing import Any

import pytest

from toolkit.base.errors import PlacementError
from toolkit.slurm.placement import Placement, derive, launch_key, rank_environment

# An allocation of 4 nodes with 2(x3),1 tasks, as the batch script sees it (Slurm 22.05).
BATCH = {
    "SLURM_JOB_ID": "41",
    "SLURM_CLUSTER_NAME": "box",
    "SLURM_NTASKS": "7",
    "SLURM_NPROCS": "7",
    "SLURM_NNODES": "4",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_JOB_NODELIST": "node[1-4]",
    "SLURM_TASKS_PER_NODE": "2(x3),1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_GTIDS": "0",
    "SLURMD_NODENAME": "node1",
}


def step(rank: int, node: int, local: int, counts: str = "2(x3),1", tasks: int = 7, **more: str) -> dict[str, str]:
    """Return the environment of a task of `srun` inside BATCH."""
    return {
        **BATCH,
        "SLURM_STEP_ID": "0",
        "SLURM_STEPID": "0",
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_STEP_NUM_NODES": "4",
        "SLURM_STEP_NODELIST": "node[1-4]",
        "SLURM_STEP_TASKS_PER_NODE": counts,
        "SLURM_PROCID": str(rank),
        "SLURM_NODEID": str(node),
        "SLURM_LOCALID": str(local),
        "SLURMD_NODENAME": f"node{node + 1}",
        "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
        "SLURM_SRUN_COMM_PORT": "40123",
        **more,
    }


def torchrun(rank: int, world: int, local: int, local_world: int, group: int, groups: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(local_world),
        "GROUP_RANK": str(group),
        "GROUP_WORLD_SIZE": str(groups),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(world),
        "MASTER_ADDR": "node1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def openmpi(rank: int, size: int, local: int, local_size: int) -> dict[str, str]:
    """Return the environment of `mpirun env` of Open MPI 5.0.11.

    OMPI_COMM_WORLD_NODE_RANK is the rank *on* the node, not the node's.
    """
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(local_size),
        "OMPI_COMM_WORLD_NODE_RANK": str(local),
        "PMIX_RANK": str(rank),
        "PMIX_NAMESPACE": "prterun-node1-3239@1",
    }


def hydra(rank: int, size: int, local: int, local_size: int) -> dict[str, str]:
    return {
        "PMI_RANK": str(rank),
        "PMI_SIZE": str(size),
        "PMI_FD": "7",
        "MPI_LOCALRANKID": str(local),
        "MPI_LOCALNRANKS": str(local_size),
    }


def numbers(p: Placement) -> tuple[int, ...]:
    return (p.rank, p.world_size, p.local_rank, p.local_world_size, p.node_rank, p.nodes)


SUPERVISED: dict[str, Any] = {
    "TOOLKIT_RUN_DIR": "runs/a/1",
    "TOOLKIT_ATTEMPT": "0",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "4000",
}

CASES: dict[str, tuple[dict[str, str], str, tuple[int, ...]]] = {
    "nothing set": ({}, "alone", (0, 1, 0, 1, 0, 1)),
    "batch script": (BATCH, "alone", (0, 1, 0, 1, 0, 1)),
    "salloc shell": ({**BATCH, "SLURM_STEP_ID": "4294967290"}, "alone", (0, 1, 0, 1, 0, 1)),
    "master exported by hand": ({"MASTER_ADDR": "x", "MASTER_PORT": "1"}, "alone", (0, 1, 0, 1, 0, 1)),
    "uneven step, first node": (step(1, 0, 1), "srun", (1, 7, 1, 2, 0, 4)),
    "uneven step, last node": (step(6, 3, 0), "srun", (6, 7, 0, 1, 3, 4)),
    "cyclic step": (step(4, 0, 1), "srun", (4, 7, 1, 2, 0, 4)),
    "arbitrary step": (step(5, 2, 0, counts="1,4,1,1"), "srun", (5, 7, 0, 1, 2, 4)),
    "srun --mpi=pmix": (
        step(3, 1, 1, PMIX_RANK="3", PMIX_NAMESPACE="slurm.pmix.41.0"),
        "srun",
        (3, 7, 1, 2, 1, 4),
    ),
    "srun --mpi=pmix, echoed by Open MPI": (
        step(3, 1, 1, PMIX_NAMESPACE="slurm.pmix.41.0", OMPI_COMM_WORLD_RANK="3", OMPI_COMM_WORLD_SIZE="7"),
        "srun",
        (3, 7, 1, 2, 1, 4),
    ),
    "srun --mpi=pmi2": (step(3, 1, 1, PMI_RANK="3", PMI_SIZE="7", PMI_JOBID="41.0"), "srun", (3, 7, 1, 2, 1, 4)),
    "supervisor's step": (step(3, 1, 1, **SUPERVISED), "supervisor", (3, 7, 1, 2, 1, 4)),
    "supervisor's step after the shim": (
        {**step(3, 1, 1, **SUPERVISED), "RANK": "3", "WORLD_SIZE": "7", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
        "supervisor",
        (3, 7, 1, 2, 1, 4),
    ),
    "wrapper copies the step's numbers": (
        step(3, 1, 1, RANK="3", WORLD_SIZE="7", LOCAL_RANK="1"),
        "srun",
        (3, 7, 1, 2, 1, 4),
    ),
    "supervisor's local process": (
        {**SUPERVISED, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
        "supervisor",
        (1, 2, 1, 2, 0, 1),
    ),
    "torchrun on one node": (torchrun(1, 4, 1, 4, 0, 1), "torchrun", (1, 4, 1, 4, 0, 1)),
    "srun torchrun": ({**step(1, 1, 0), **torchrun(5, 8, 1, 4, 1, 2)}, "torchrun", (5, 8, 1, 4, 1, 2)),
    "srun torchrun, same size": ({**step(1, 1, 0), **torchrun(5, 7, 1, 4, 1, 2)}, "torchrun", (5, 7, 1, 4, 1, 2)),
    "torchrun under mpirun": ({**openmpi(1, 2, 0, 1), **torchrun(5, 8, 1, 4, 1, 2)}, "torchrun", (5, 8, 1, 4, 1, 2)),
    "mpirun": (openmpi(3, 4, 1, 2), "mpi", (3, 4, 1, 2, 1, 2)),
    "mpirun in a batch script": ({**BATCH, **openmpi(1, 2, 1, 2)}, "mpi", (1, 2, 1, 2, 0, 1)),
    "mpirun in a step": ({**step(0, 0, 0), **openmpi(1, 2, 1, 2)}, "mpi", (1, 2, 1, 2, 0, 1)),
    "mpirun in a step of pmi2": (
        {**step(0, 0, 0, PMI_RANK="0", PMI_SIZE="7", PMI_JOBID="41.0"), **openmpi(1, 2, 1, 2)},
        "mpi",
        (1, 2, 1, 2, 0, 1),
    ),
    "mpirun's second node, under the step of its daemon": (
        {**step(0, 0, 0, counts="1", tasks=1, SLURM_STEP_NUM_NODES="1"), **openmpi(3, 4, 1, 2)},
        "mpi",
        (3, 4, 1, 2, 1, 2),
    ),
    "mpich": (hydra(1, 2, 1, 2), "mpi", (1, 2, 1, 2, 0, 1)),
    "mpich in a step of pmix": (
        {**step(0, 0, 0, PMIX_RANK="0", PMIX_NAMESPACE="slurm.pmix.41.0"), **hydra(1, 2, 1, 2)},
        "mpi",
        (1, 2, 1, 2, 0, 1),
    ),
    "mpich in a step of pmi2": (
        {**step(0, 0, 0, PMI_JOBID="41.0"), **hydra(1, 2, 1, 2)},
        "mpi",
        (1, 2, 1, 2, 0, 1),
    ),
    "het step": (
        step(5, 2, 1, counts="1,3,2", tasks=6, SLURM_STEP_NUM_NODES="3", SLURM_STEP_NODELIST="a1,b[1-2]"),
        "srun",
        (5, 6, 1, 2, 2, 3),
    ),
}


@pytest.mark.parametrize(("environ", "launcher", "expected"), CASES.values(), ids=CASES.keys())
def test_the_innermost_launcher_tells_the_rank(
    environ: dict[str, str], launcher: str, expected: tuple[int, ...]
) -> None:
    placement = derive(environ, "here")
    assert placement.launcher == launcher
    assert numbers(placement) == expected


def torch_minimum(rank: int, world: int, master: str, **more: str) -> dict[str, str]:
    """Return what ``init_process_group("env://")`` needs, and nothing else."""
    return {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": master, "MASTER_PORT": "29500", **more}


#: Without LOCAL_WORLD_SIZE or without node numbers: the six numbers, and from what the local size was taken.
MINIMAL: dict[str, tuple[dict[str, str], tuple[int, ...], str]] = {
    "loopback": (torch_minimum(1, 2, "127.0.0.1"), (1, 2, 1, 2, 0, 1), "MASTER_ADDR=127.0.0.1"),
    "localhost, local rank": (torch_minimum(1, 2, "localhost", LOCAL_RANK="1"), (1, 2, 1, 2, 0, 1), "MASTER_ADDR"),
    "a pod for each rank": (
        torch_minimum(2, 3, "job-master-0", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1"),
        (2, 3, 0, 1, 2, 3),
        "LOCAL_WORLD_SIZE",
    ),
    "one node each": (torch_minimum(2, 3, "job-master-0", NNODES="3"), (2, 3, 0, 1, 2, 3), "NNODES=3"),
    "one node": (torch_minimum(2, 3, "node1", GROUP_WORLD_SIZE="1"), (2, 3, 2, 3, 0, 1), "GROUP_WORLD_SIZE=1"),
    "no node numbers": (
        torch_minimum(5, 8, "node1", LOCAL_RANK="1", LOCAL_WORLD_SIZE="4"),
        (5, 8, 1, 4, 1, 2),
        "LOCAL_WORLD_SIZE",
    ),
}

#: Where the ranks meet, by the launcher.
STORE = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"}


@pytest.mark.parametrize(("environ", "expected", "source"), MINIMAL.values(), ids=MINIMAL.keys())
def test_torchs_minimal_environment_is_enough_where_the_rest_follows(
    environ: dict[str, str], expected: tuple[int, ...], source: str
) -> None:
    placement = derive(environ, "here")
    assert numbers(placement) == expected
    assert source in placement.sources["local_world_size"]
    assert bool(placement.notes) == (placement.nodes > 1)
    assert numbers(derive(rank_environment(placement) | STORE, "here")) == expected


CONTRADICTIONS: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "rank beyond the step": (step(7, 3, 0), ("SLURM_PROCID=7", "SLURM_STEP_NUM_TASKS=7")),
    "local rank beyond the node": (step(6, 3, 1), ("SLURM_LOCALID=1", "SLURM_STEP_TASKS_PER_NODE=1")),
    "node beyond the step": (step(6, 4, 0), ("SLURM_NODEID=4", "SLURM_STEP_NUM_NODES=4")),
    "tasks per node of another step": (step(6, 3, 0, counts="2(x2)"), ("2(x2)", "SLURM_STEP_NUM_NODES=4")),
    "nodes of another step": (step(6, 3, 0, SLURM_STEP_NODELIST="node1"), ("SLURM_STEP_NODELIST", "NUM_NODES=4")),
    "step without a rank": (
        {k: v for k, v in step(0, 0, 0).items() if k != "SLURM_PROCID"},
        ("SLURM_STEP_ID=0", "SLURM_PROCID"),
    ),
    "pmix and step": (
        step(3, 1, 1, PMIX_RANK="2", PMIX_NAMESPACE="slurm.pmix.41.0"),
        ("PMIX_RANK=2", "SLURM_PROCID=3"),
    ),
    "pmi2 and step": (step(3, 1, 1, PMI_RANK="2", PMI_SIZE="7", PMI_JOBID="41.0"), ("PMI_RANK=2", "SLURM_PROCID=3")),
    "rank without world size": ({"RANK": "0"}, ("RANK=0", "WORLD_SIZE")),
    "rank beyond the world": ({**torchrun(4, 4, 1, 4, 0, 1)}, ("RANK=4", "WORLD_SIZE=4")),
    "rank without local rank": ({"RANK": "0", "WORLD_SIZE": "2"}, ("RANK=0", "LOCAL_RANK")),
    "a master elsewhere": (torch_minimum(1, 2, "node7"), ("MASTER_ADDR=node7", "set LOCAL_RANK and LOCAL_WORLD_SIZE")),
    "a master elsewhere, local rank": (torch_minimum(1, 2, "node7", LOCAL_RANK="1"), ("LOCAL_WORLD_SIZE is not",)),
    "which of its node's": (torch_minimum(1, 4, "node7", LOCAL_WORLD_SIZE="2"), ("LOCAL_WORLD_SIZE=2", "LOCAL_RANK")),
    "nodes of different sizes": (
        torch_minimum(1, 5, "node7", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2"),
        ("LOCAL_WORLD_SIZE=2", "WORLD_SIZE=5", "set GROUP_RANK and GROUP_WORLD_SIZE"),
    ),
    "rank exported in the batch script": (
        step(3, 1, 1, RANK="0", WORLD_SIZE="7"),
        ("RANK=0", "SLURM_PROCID=3", "batch script"),
    ),
    "two kinds of mpirun": (
        {**openmpi(1, 2, 1, 2), **hydra(0, 2, 0, 2)},
        ("OMPI_COMM_WORLD_RANK=1", "PMI_RANK=0"),
    ),
    "Open MPI and PMIx": ({**openmpi(1, 2, 1, 2), "PMIX_RANK": "0"}, ("OMPI_COMM_WORLD_RANK=1", "PMIX_RANK=0")),
    "PMIx alone": ({"PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-a-1@1"}, ("PMIX_RANK=1", "how many")),
    "not a number": (torchrun(0, 2, 0, 2, 0, 1) | {"LOCAL_RANK": "one"}, ("LOCAL_RANK='one'",)),
}


@pytest.mark.parametrize(("environ", "parts"), CONTRADICTIONS.values(), ids=CONTRADICTIONS.keys())
def test_a_contradiction_within_one_launcher_shows_both_values(environ: dict[str, str], parts: tuple[str, ...]) -> None:
    with pytest.raises(PlacementError) as caught:
        derive(environ, "here")
    assert all(part in str(caught.value) for part in (*parts, "What to do"))


def test_uneven_tasks_per_node_are_never_divided() -> None:
    sizes = [derive(step(rank, rank // 2, rank % 2), "here").local_world_size for rank in range(7)]
    assert sizes == [2, 2, 2, 2, 2, 2, 1]


def test_two_steps_of_one_job_have_different_hosts() -> None:
    second = step(0, 0, 0, counts="1", tasks=1, SLURM_STEP_NUM_NODES="1", SLURM_STEP_NODELIST="node3")
    assert derive(second, "here").hosts == ("node3",)
    assert derive(step(0, 0, 0), "here").hosts == ("node1", "node2", "node3", "node4")


def test_python_in_a_batch_script_is_told_that_it_is_alone() -> None:
    (note,) = derive(BATCH, "node1").notes
    assert "7 tasks" in note
    assert "srun" in note


def test_a_world_size_without_a_rank_is_noted_and_ignored() -> None:
    assert "WORLD_SIZE=8" in derive({"WORLD_SIZE": "8"}, "here").notes[0]


def test_node_numbers_guessed_under_mpirun_are_noted() -> None:
    assert derive(openmpi(3, 4, 1, 2), "here").notes
    assert not derive(openmpi(1, 2, 1, 2), "here").notes


def test_sources_name_the_variable_of_every_number() -> None:
    sources = derive(step(3, 1, 1), "here").sources
    assert sources["rank"] == "SLURM_PROCID"
    assert sources["world_size"] == "SLURM_STEP_NUM_TASKS"
    assert sources["local_world_size"] == "SLURM_STEP_TASKS_PER_NODE"


def test_the_job_of_an_array_element_is_named_with_its_index() -> None:
    placement = derive({**BATCH, "SLURM_ARRAY_JOB_ID": "40", "SLURM_ARRAY_TASK_ID": "3"}, "node1")
    assert (placement.job, placement.job_id) == ("40_3", "41")


@pytest.mark.parametrize(("environ", "count"), [({}, None), (BATCH, 0), ({**BATCH, "SLURM_RESTART_COUNT": "2"}, 2)])
def test_the_restart_count_is_zero_until_slurm_sets_it(environ: dict[str, str], count: int | None) -> None:
    assert derive(environ, "here").restart_count == count


@pytest.mark.parametrize("environ", [case[0] for case in CASES.values()], ids=CASES.keys())
def test_the_rank_environment_leads_to_the_same_ranks_again(environ: dict[str, str]) -> None:
    first = derive(environ, "here")
    shim = rank_environment(first) | STORE
    assert numbers(derive(shim, "here")) == numbers(first)
    assert numbers(derive({**environ, **shim}, "here")) == numbers(first)


def test_the_rank_environment_is_what_torchrun_sets() -> None:
    theirs = torchrun(5, 8, 1, 4, 1, 2)
    ours = rank_environment(derive(theirs, "here"))
    assert ours == {name: theirs[name] for name in ours if name != "NODE_RANK"} | {"NODE_RANK": "1"}


def distinct_keys(*launches: dict[str, str]) -> int:
    return len({launch_key(launch) for launch in launches})


def test_all_ranks_of_a_launch_share_its_key() -> None:
    assert distinct_keys(*(step(rank, rank // 2, rank % 2) for rank in range(7))) == 1
    assert distinct_keys(*(openmpi(rank, 4, rank % 2, 2) for rank in range(4))) == 1
    assert distinct_keys(*(torchrun(rank, 4, rank % 2, 2, rank // 2, 2) for rank in range(4))) == 1


def test_the_components_of_a_het_step_share_a_key_although_their_ports_differ() -> None:
    ports = ("40123", "40777")
    assert distinct_keys(*(step(0, 0, 0, SLURM_HET_SIZE="2", SLURM_SRUN_COMM_PORT=port) for port in ports)) == 1


def test_two_steps_a_restart_and_another_cluster_have_keys_of_their_own() -> None:
    variations: list[dict[str, Any]] = [
        {},
        {"SLURM_STEP_ID": "1"},
        {"SLURM_RESTART_COUNT": "1"},
        {"SLURM_CLUSTER_NAME": "other"},
        {"SLURM_SRUN_COMM_PORT": "40124"},
        {"SLURM_LAUNCH_NODE_IPADDR": "10.0.0.2"},
    ]
    assert distinct_keys(*(step(0, 0, 0, **more) for more in variations)) == len(variations)


@pytest.mark.parametrize("environ", [{}, BATCH, hydra(0, 2, 0, 2)], ids=["alone", "batch script", "plain mpich"])
def test_a_launch_without_anything_unique_has_no_key(environ: dict[str, str]) -> None:
    assert launch_key(environ) is None


def test_intel_mpi_is_keyed_by_its_uuid() -> None:
    assert launch_key({**hydra(0, 2, 0, 2), "I_MPI_HYDRA_UUID": "9d26-7c"}) == "mpi-9d26-7c"
