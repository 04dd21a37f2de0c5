"""Ranks that share a GPU: each sees its own alone, and has CPUs near it."""

import os
import selectors
from pathlib import Path

import pytest

from toolkit.base.errors import ConfigError
from toolkit.config import JobConfig, load_config, validate
from toolkit.devices.kinds import single_gpu_variables
from toolkit.nodes.agent.messages import ProcessSpec, StartOrder
from toolkit.nodes.agent.processes import Processes
from toolkit.nodes.agent.zygote import ForkOrder
from toolkit.nodes.allocation import Allocation

SHARED = ["cluster.gpus_per_node=2", "cluster.tasks_per_node=4", "cluster.tasks_per_gpu=2", "cluster.cpus_per_task=1"]
CUDA, ROCR, HIP, ZE = "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"


def test_neighbouring_ranks_of_a_node_share_a_gpu_and_have_cpus_near_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[ForkOrder] = []

    def start_one(self: Processes, order: ForkOrder) -> int:
        started.append(order)
        return 2**22 + len(started)  # no process's number

    monkeypatch.setattr(Processes, "_start_one", start_one)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setenv(CUDA, "2,5")
    node = Processes(selectors.DefaultSelector(), lambda message: None, None)
    node.near_gpus = [[4, 5, 6, 7], [0, 1, 2, 3]]
    ranks = tuple(ProcessSpec(rank, {}, str(tmp_path / f"{rank}.log")) for rank in range(4))
    order = StartOrder(1, None, ("true",), {}, (), ranks, cpus_per_task=2, tasks_per_gpu=2, gets_signals=False)
    node.start(order)
    assert [one["environ"][CUDA] for one in started] == ["2", "2", "5", "5"]
    near = [{*(one["cpus"] or ())} for one in started]
    assert near[0] | near[1] == {4, 5, 6, 7}
    assert near[2] | near[3] == {0, 1, 2, 3}
    node.start(order.replace(cpus_per_task=None, tasks_per_gpu=1))
    assert {one["environ"][CUDA] for one in started[4:]} == {"2,5"}


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        ({CUDA: "0,1"}, {CUDA: "1"}),
        ({CUDA: "GPU-4b1c,GPU-77aa"}, {CUDA: "GPU-77aa"}),
        ({CUDA: "0"}, {CUDA: "0"}),  # fewer GPUs than the ranks need
        ({ROCR: "4,6"}, {ROCR: "6"}),
        ({ROCR: "4,6", HIP: "0,1"}, {HIP: "1"}),  # HIP counts what ROCR leaves
        ({CUDA: "0,1", ROCR: "0,1", ZE: "0,1"}, {CUDA: "1", ZE: "1"}),  # what Slurm sets where a site names no vendor
        ({ZE: "2,3"}, {ZE: "3"}),
        ({CUDA: ""}, {}),  # no GPU is shown, and none is added
        ({}, {CUDA: "1"}),
    ],
)
def test_the_one_gpu_is_named_as_the_node_names_it(shown: dict[str, str], expected: dict[str, str]) -> None:
    assert single_gpu_variables({"PATH": "/bin", **shown}, 1) == expected


def test_a_config_says_how_many_ranks_share_a_gpu() -> None:
    config = load_config(None, SHARED)
    validate(config)
    assert Allocation.local(config.cluster).tasks_per_gpu == 2
    config.cluster.tasks_per_node = 5
    with pytest.raises(ConfigError, match=r"5 ranks cannot share 2 GPUs of a node, each for 2: .*tasks_per_gpu=3"):
        validate(config)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("dist.backend=nccl", r"dist\.backend: NCCL refuses two ranks on one GPU, and cluster\.tasks_per_gpu is 2"),
        ("cluster.gpus_per_node=0", r"cluster\.tasks_per_gpu: 2 ranks on each GPU, and cluster\.gpus_per_node is 0"),
    ],
)
def test_what_ranks_on_one_gpu_cannot_do_is_refused_before_anything_is_queued(override: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        validate(load_config(None, [*SHARED, override]))


def test_shares_of_a_gpu_are_gpus_too() -> None:
    config: JobConfig = load_config(None, [*SHARED, "cluster.gpus_per_node=0", "cluster.extra={gres: 'shard:4'}"])
    validate(config)
