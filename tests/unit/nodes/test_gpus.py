"""Which CPUs are near which GPU. Each task gets the CPUs near its own GPU."""

import inspect
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from toolkit.devices import on_node as gpus
from toolkit.nodes.agent import node, processes

UUID = "GPU-{:08x}-0000-1111-2222-333344445555"

CPUS = "sys/devices/system/cpu"


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Return a function that writes a machine of two packages with one NUMA node each.

    The even cores belong to the first package.
    """

    def write(nodes: Sequence[int], cores: int = 16, minors: Sequence[int] | None = None) -> Path:
        """Write the machine's files. ``nodes`` has the NUMA node of each GPU, in the order of PCI addresses."""
        cpu_root, node_root = tmp_path / CPUS, tmp_path / "sys/devices/system/node"
        for cpu in range(2 * cores):
            core = cpu % cores
            put(cpu_root / f"cpu{cpu}/topology/physical_package_id", core % 2)
            put(cpu_root / f"cpu{cpu}/topology/thread_siblings_list", f"{core},{core + cores}")
        for package in (0, 1):
            put(node_root / f"node{package}/cpulist", ",".join(map(str, range(package, 2 * cores, 2))))
        for index, (numa_node, minor) in enumerate(zip(nodes, minors or range(len(nodes)), strict=True)):
            address = f"0000:{16 * index + 7:02x}:00.0"
            put(tmp_path / f"sys/bus/pci/devices/{address}/numa_node", numa_node)
            put(tmp_path / f"proc/driver/nvidia/gpus/{address}/information", information(index, minor))
            put(tmp_path / f"dev/nvidia{minor}", "")
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(2 * cores)))
        return tmp_path

    return write


def put(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def information(index: int, minor: int, model: str = "NVIDIA H100 80GB HBM3") -> str:
    """Return a GPU's information file as the driver writes it (open-gpu-kernel-modules, nv-procfs.c)."""
    return f"Model: \t\t {model}\nIRQ:   \t\t 18\nGPU UUID: \t {UUID.format(index)}\nDevice Minor: \t {minor}"


def nodes_of(near: list[list[int]]) -> list[int]:
    """Return the NUMA node of each group of CPUs."""
    return [node for own in near for (node,) in [{cpu % 2 for cpu in own}]]  # fails for CPUs of several nodes


def torchs_choice(root: Path, gpu_count: int, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Return the CPUs that torchrun's --numa-binding=exclusive gives each rank of the machine under ``root``."""
    binding = pytest.importorskip("torch.numa.binding", reason="torch before 2.9 binds no ranks")
    module = SimpleNamespace(
        get_device_properties=lambda index: SimpleNamespace(pci_domain_id=0, pci_bus_id=16 * index + 7, pci_device_id=0)
    )
    accelerator = SimpleNamespace(
        is_available=lambda: True, current_accelerator=lambda: None, device_count=lambda: gpu_count
    )
    # torch 2.11 asks torch.cuda, and its argument has another name.
    cuda = SimpleNamespace(**vars(module), device_count=lambda: gpu_count)
    played: Any = SimpleNamespace(accelerator=accelerator, get_device_module=lambda accelerator: module, cuda=cuda)
    monkeypatch.setattr(binding, "torch", played)
    monkeypatch.setattr(binding, "open", lambda path: (root / path[1:]).open(), raising=False)
    chosen: Callable[..., set[int]] = binding._exclusive_get_logical_cpus_to_bind_to
    (index_word,) = inspect.signature(chosen).parameters
    return [sorted(chosen(**{index_word: index})) for index in range(gpu_count)]


@pytest.mark.parametrize("nodes", [[0, 0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0, 0], [0, 1, 0, 1, 1, 0, 1, 0]])
def test_each_task_has_cores_of_its_gpus_numa_node_as_torch_gives_them(
    play: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, nodes: list[int]
) -> None:
    root = play(nodes)
    sets = processes.for_tasks(8, 4, gpus.near_cpus({}, root), root / CPUS)
    assert sets == torchs_choice(root, 8, monkeypatch)
    assert sorted(cpu for own in sets for cpu in own or []) == [*range(32)]


def test_tasks_take_the_nearest_of_what_is_left_where_their_numa_node_has_too_few(play: Callable[..., Path]) -> None:
    root = play([0, 0, 0, 1], cores=4)
    near = gpus.near_cpus({}, root)  # four CPUs of each node, and two for each task
    assert processes.for_tasks(4, 2, near, root / CPUS) == [[0, 4], [2, 6], [3, 7], [1, 5]]


def test_a_task_stays_in_the_package_before_it_leaves_it(play: Callable[..., Path]) -> None:
    root = play([])
    near = [[0, 16], [1, 17], [1, 17]]  # NUMA nodes smaller than a package
    assert processes.for_tasks(3, 2, near, root / CPUS) == [[0, 16], [1, 17], [3, 19]]


def test_cpus_that_this_process_may_not_use_are_given_to_no_task(
    play: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = play([1, 0])
    near = gpus.near_cpus({}, root)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2, 16, 18, 3, 19})
    assert processes.for_tasks(2, 2, near, root / CPUS) == [[3, 19], [0, 16]]
    assert processes.for_tasks(2, 3, near, root / CPUS) == [[3, 18, 19], [0, 2, 16]]


def test_tasks_that_share_a_gpu_have_cpus_of_their_own(play: Callable[..., Path]) -> None:
    root = play([1])
    near = gpus.near_cpus({}, root)
    assert processes.for_tasks(2, 2, near, root / CPUS) == [[1, 17], [3, 19]]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("3,0", [1, 0]),
        (f"{UUID.format(2)},{UUID.format(1)}", [1, 0]),
        ("GPU-00000003", [1]),
    ],
)
def test_cuda_visible_devices_says_which_gpus_ranks_use(
    play: Callable[..., Path], visible: str, expected: list[int]
) -> None:
    root = play([0, 0, 1, 1])
    assert nodes_of(gpus.near_cpus({"CUDA_VISIBLE_DEVICES": visible}, root)) == expected


def test_indexes_count_the_gpus_that_may_be_opened_in_pci_order(play: Callable[..., Path]) -> None:
    root = play([0, 0, 1, 1], minors=[2, 3, 0, 1])
    (root / "dev/nvidia2").unlink()
    (root / "dev/nvidia0").unlink()
    assert nodes_of(gpus.near_cpus({"CUDA_VISIBLE_DEVICES": "0,1"}, root)) == [0, 1]
    assert nodes_of(gpus.near_cpus({}, root)) == [0, 1]


@pytest.mark.parametrize("visible", ["4", "-1", "NoDevFiles", "MIG-6e0c", "GPU-0000", "GPU-ffff", "0,x"])
def test_nothing_is_said_of_gpus_that_are_not_certain(play: Callable[..., Path], visible: str) -> None:
    root = play([0, 0, 1, 1])
    with pytest.raises((OSError, LookupError, ValueError)):
        gpus.near_cpus({"CUDA_VISIBLE_DEVICES": visible}, root)


def test_a_variable_may_hide_all_gpus(play: Callable[..., Path]) -> None:
    assert gpus.near_cpus({"CUDA_VISIBLE_DEVICES": ""}, play([0, 1])) == []


def test_nothing_is_said_without_a_numa_node(play: Callable[..., Path]) -> None:
    with pytest.raises(FileNotFoundError):
        gpus.near_cpus({}, play([0, -1]))


def test_unequal_gpus_are_numbered_by_address_only_where_cuda_is_told_to(play: Callable[..., Path]) -> None:
    root = play([1, 0])
    put(root / "proc/driver/nvidia/gpus/0000:07:00.0/information", information(0, 0, "NVIDIA T400"))
    with pytest.raises(ValueError, match="order of its own"):
        gpus.near_cpus({}, root)
    assert nodes_of(gpus.near_cpus({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, root)) == [1, 0]


def test_without_a_gpu_the_program_prints_nothing() -> None:
    if gpus.has_gpus():
        pytest.skip("this machine has a GPU")
    done = subprocess.run(node.GPUS_COMMAND, check=True, capture_output=True)
    assert (done.stdout.strip(), done.stderr) == (b"[]", b"")


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("print('[[0, 2], [1, 3]]')", [[0, 2], [1, 3]]),
        ("print('a driver says hello'); print('[[0, 2], [1, 3]]')", [[0, 2], [1, 3]]),
        ("", []),
        ("print('[[0, 2], [1,')", []),
        ("print('{\"0\": [1]}')", []),
        ("print('[[0, -2]]')", []),
        ("print('[' * 100000)", []),
    ],
    ids=["whole", "behind other output", "nothing", "cut off", "an object", "no CPU", "deep"],
)
def test_the_agent_hears_what_the_program_prints(program: str, expected: list[list[int]]) -> None:
    played: Any = None
    agent = node.Agent(played, b"", ("here", 1), played, None)
    agent._helpers.ask((sys.executable, "-I", "-S", "-c", program), agent._processes.set_near_cpus)
    end = time.monotonic() + 30
    while agent._selector.get_map() and time.monotonic() < end:
        for key, _ in agent._selector.select(1):
            key.data()
    assert agent._processes.near_gpus == expected
    for pid in agent._helpers.pids:
        os.waitpid(pid, 0)
