"""A library in place of NVIDIA's, compiled for the tests. Most machines have no GPU."""

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest


class FakeDriver:
    """Two GPUs with given figures: ``{"busy": (50, 0)}``, a value for each. A name that is missing is unsupported."""

    def __init__(self, library: Path, file: Path) -> None:
        self.library, self._file = str(library), file
        self.tell({})

    def tell(self, values: Mapping[str, tuple[int, int]]) -> None:
        rows = [f"{name} {gpu} {value}\n" for name, both in values.items() for gpu, value in enumerate(both)]
        self._file.write_text("".join(rows))

    def xid(self, gpu: int, number: int) -> None:
        with self._file.open("a") as file:
            file.write(f"xid {gpu} {number}\n")


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler to make a fake NVML with")
    library = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
    source = Path(__file__).parent / "fake_nvml.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
    return library


@pytest.fixture
def driver(nvml_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    monkeypatch.setenv("NVML_FAKE", str(tmp_path / "gpus"))
    # A library that is open already keeps its state: each test has its own.
    own = Path(shutil.copy(nvml_library, tmp_path / "libnvidia-ml.so.1"))
    return FakeDriver(own, tmp_path / "gpus")
