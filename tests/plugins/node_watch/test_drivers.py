"""What AMD's and Intel's drivers tell of the GPUs of real machines, by their files."""

import shutil
from pathlib import Path

import pytest

from tests.unit.devices.machines import DAWN, DGX, LUMI
from toolkit.devices.on_node import GpusError
from toolkit.plugins.node_watch.sysfs import AmdGpus, IntelGpus, open_gpus


def test_amds_driver_tells_use_memory_power_errors_and_processes(tmp_path: Path) -> None:
    root = LUMI.write(tmp_path)
    for pid, held in ((4242, 5 << 30), (7, 0)):
        file = root / f"sys/class/kfd/kfd/proc/{pid}/vram_40002"
        file.parent.mkdir(parents=True)
        file.write_text(str(held))
    gpus = open_gpus({"ROCR_VISIBLE_DEVICES": "2,3"}, root)
    assert isinstance(gpus, AmdGpus)
    first, second = gpus.gpus
    assert (first.index, first.model) == (2, "AMD Instinct MI250X")
    load = gpus.utilization(first)
    assert (load.busy, load.memory_bytes, load.total_memory_bytes) == (0.87, 10 << 30, 64 << 30)
    assert (load.power_w, load.energy_j) == (231.0, None)
    condition = gpus.health(first)
    assert (condition.uncorrected_errors, condition.link_width, condition.most_link_generation) == (2, 16, 4)
    assert gpus.link(first) == (4, 16)
    assert ([*gpus.processes(first)], [*gpus.processes(second)]) == ([4242], [])
    assert "energy" in gpus.cannot_tell
    shutil.rmtree(first.handle)
    assert gpus.health(first).is_lost


def test_intels_driver_tells_energy_and_says_that_it_tells_no_use(tmp_path: Path) -> None:
    gpus = open_gpus({}, DAWN.write(tmp_path))
    assert isinstance(gpus, IntelGpus)
    assert len(gpus.gpus) == 4  # tiles share their GPU's files
    load = gpus.utilization(gpus.gpus[3])
    assert (load.busy, load.memory_bytes, load.energy_j) == (None, None, 7000.0)
    assert gpus.link(gpus.gpus[3]) == (5, 16)
    assert "use" in gpus.cannot_tell


def test_files_that_are_not_as_documented_are_an_error_of_the_watch(tmp_path: Path) -> None:
    root = LUMI.write(tmp_path)
    (root / "sys/class/kfd/kfd/topology/nodes/4/properties").write_text("simd_count many")
    with pytest.raises(GpusError, match="many"):
        open_gpus({}, root)


def test_a_node_without_gpus_has_none(tmp_path: Path) -> None:
    assert open_gpus({}, tmp_path) is None


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"])
def test_a_variable_that_hides_all_gpus_leaves_none(tmp_path: Path, name: str) -> None:
    assert open_gpus({name: ""}, LUMI.write(tmp_path)) is None


def test_without_nvidias_library_nothing_is_known_and_nothing_is_wrong(tmp_path: Path) -> None:
    root = DGX.write(tmp_path)
    (root / "dev/nvidiactl").touch()
    assert open_gpus({}, root) is None
