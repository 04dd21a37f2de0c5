"""Which GPUs a node has and which CPUs are near each, on nodes of real machines."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from tests.unit.devices.machines import DAWN, DGX, JUPITER, LUMI, Machine
from toolkit import registry
from toolkit.devices import accelerator, kinds, on_node
from toolkit.devices.kinds import ROCM, contradiction


def numa_nodes(machine: Machine, root: Path, environ: Mapping[str, str] | None = None) -> list[int]:
    """Return the NUMA node of each visible device, by the CPUs that are near."""
    lists = [on_node.parse_cpulist(cpus) for cpus in machine.numa_cpus]
    return [lists.index(near) for near in on_node.near_cpus(environ or {}, root)]


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        pytest.param(LUMI, [3, 3, 1, 1, 0, 0, 2, 2], id="lumi"),
        pytest.param(JUPITER, [0, 1, 2, 3], id="jupiter"),
        pytest.param(DGX, [0, 0, 0, 0, 1, 1, 1, 1], id="dgx"),
        pytest.param(DAWN, [0, 0, 0, 0, 1, 1, 1, 1], id="dawn"),
    ],
)
def test_cpus_near_the_gpus_of_a_real_machine(tmp_path: Path, machine: Machine, expected: Sequence[int]) -> None:
    root = machine.write(tmp_path)
    assert on_node.has_gpus(root)
    assert len(on_node.allowed(root)) == len(machine.gpus)
    assert numa_nodes(machine, root) == expected


@pytest.mark.parametrize(
    ("machine", "environ", "expected"),
    [
        (LUMI, {"ROCR_VISIBLE_DEVICES": "4,5"}, [0, 0]),
        (LUMI, {"ROCR_VISIBLE_DEVICES": "2,4,0", "HIP_VISIBLE_DEVICES": "2,0"}, [3, 1]),
        # HIP takes CUDA's variable where its own is empty, and no other time.
        (LUMI, {"CUDA_VISIBLE_DEVICES": "7"}, [2]),
        (LUMI, {"HIP_VISIBLE_DEVICES": "4", "CUDA_VISIBLE_DEVICES": "7"}, [0]),
        (LUMI, {"HIP_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": "7"}, [2]),
        (LUMI, {"ROCR_VISIBLE_DEVICES": "GPU-0000000000001006,GPU-0000000000001000"}, [2, 3]),
        (LUMI, {"ROCR_VISIBLE_DEVICES": ""}, []),
        (
            LUMI,
            {"GPU_DEVICE_ORDINAL": "7", "ZE_AFFINITY_MASK": "7"},
            [3, 3, 1, 1, 0, 0, 2, 2],
        ),  # of OpenCL, of Intel
        (DAWN, {"ZE_AFFINITY_MASK": "1,4"}, [0, 1]),  # since 2023 tiles are counted
        (DAWN, {"ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE", "ZE_AFFINITY_MASK": "1,3"}, [0, 1]),
        (DAWN, {"ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"}, [0, 0, 1, 1]),
    ],
)
def test_each_runtimes_variables_choose_among_its_gpus(
    tmp_path: Path, machine: Machine, environ: Mapping[str, str], expected: Sequence[int]
) -> None:
    assert numa_nodes(machine, machine.write(tmp_path), environ) == expected


@pytest.mark.parametrize(
    "environ",
    [
        {"ROCR_VISIBLE_DEVICES": "6,7", "CUDA_VISIBLE_DEVICES": "6,7"},
        {"ROCR_VISIBLE_DEVICES": "GPU-00000000000010ff"},
        {"HIP_VISIBLE_DEVICES": "8"},
        {"HIP_VISIBLE_DEVICES": "-1"},
    ],
)
def test_nothing_is_said_of_amds_gpus_that_are_not_certain(tmp_path: Path, environ: Mapping[str, str]) -> None:
    with pytest.raises((LookupError, ValueError)):
        on_node.near_cpus(environ, LUMI.write(tmp_path))


def test_variables_that_leave_no_gpu_are_named_with_what_to_do() -> None:
    both = {"ROCR_VISIBLE_DEVICES": "6,7", "CUDA_VISIBLE_DEVICES": "6,7"}
    said = contradiction(ROCM, both) or ""
    assert "CUDA_VISIBLE_DEVICES=6,7 counts among the 2 devices that ROCR_VISIBLE_DEVICES=6,7 leaves" in said
    assert "unset CUDA_VISIBLE_DEVICES" in said
    assert contradiction(ROCM, {**both, "CUDA_VISIBLE_DEVICES": "0,1"}) is None
    # As a site with ConstrainDevices has it: the numbers begin anew in each job.
    assert contradiction(ROCM, {"ROCR_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": "1"}) is None


@pytest.mark.parametrize(
    ("machine", "options"),
    [(LUMI, ["--rocm"]), (DGX, ["--nv"]), (DAWN, ["--nv", "--rocm"]), (None, ["--nv", "--rocm"])],
)
def test_apptainer_is_told_whose_gpus_they_are(tmp_path: Path, machine: Machine | None, options: list[str]) -> None:
    assert on_node.apptainer_options(tmp_path if machine is None else machine.write(tmp_path)) == options


def test_partitions_of_a_gpu_have_its_address(tmp_path: Path) -> None:
    """amdkfd puts a partition's number into the function of its address (kfd_topology.c)."""
    root = LUMI.write(tmp_path)
    file = root / "sys/class/kfd/kfd/topology/nodes/5/properties"
    text = file.read_text()
    place = re.search(r"location_id (\d+)", text)
    file.write_text(text.replace(place[0], f"location_id {int(place[1]) | 3}"))
    assert [gpu.address for gpu in on_node.allowed(root)] == [address for address, _ in LUMI.gpus]


def test_gpus_of_other_jobs_are_not_counted(tmp_path: Path) -> None:
    root = LUMI.write(tmp_path)
    for minor in (128, 129, 130, 131):
        (root / f"dev/dri/renderD{minor}").unlink()
    assert numa_nodes(LUMI, root, {"ROCR_VISIBLE_DEVICES": "0,1"}) == [0, 0]


def test_a_node_without_gpus_has_none(tmp_path: Path) -> None:
    assert not on_node.has_gpus(tmp_path)
    assert on_node.near_cpus({}, tmp_path) == []


def test_a_message_says_what_the_node_has_and_what_hides_it(tmp_path: Path) -> None:
    environ = {"ROCR_VISIBLE_DEVICES": "6,7", "CUDA_VISIBLE_DEVICES": "6,7"}
    said = on_node.described(environ, LUMI.write(tmp_path))
    assert said.startswith("the node has 8 for ROCm, CUDA_VISIBLE_DEVICES='6,7', ROCR_VISIBLE_DEVICES='6,7', ")
    assert said.endswith("unset CUDA_VISIBLE_DEVICES")


def test_files_that_are_not_as_documented_are_said_to_be_unreadable(tmp_path: Path) -> None:
    root = LUMI.write(tmp_path)
    (root / "sys/class/kfd/kfd/topology/nodes/4/properties").write_text("simd_count many")
    assert "cannot be read" in on_node.described({}, root)


def test_plugins_are_not_searched_for_a_kind_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search of the installed packages would be made by every rank at its start."""
    monkeypatch.setattr(accelerator, "_built_for", lambda: torch.device("xpu"))
    monkeypatch.setattr(registry, "find", lambda *words: pytest.fail(f"searched for {words}"))
    accelerator.built_for.cache_clear()
    try:
        assert accelerator.built_for() is kinds.XPU
    finally:
        accelerator.built_for.cache_clear()
