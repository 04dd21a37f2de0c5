"""The plugin of srun that an MPI library needs is derived from the library."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from toolkit.config import DistConfig, JobConfig
from toolkit.plugins.mpi import srun_launcher as launcher
from toolkit.plugins.testing.fake_slurm import FakeSlurm
from toolkit.slurm.commands import Settings


@pytest.mark.parametrize(
    ("library", "plugin"),
    [
        ("Open MPI v5.0.11, package: Debian OpenMPI", "pmix"),
        ("MPICH Version:      5.0.2\nMPICH ABI:          18:2:6", "pmi2"),
        ("Intel(R) MPI Library 2021.13 for Linux* OS", "pmi2"),
        ("MVAPICH Version:      4.0", "pmi2"),
    ],
)
def test_each_kind_of_mpi_has_its_plugin(tmp_path: Path, library: str, plugin: str) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nprintf '%s\\n' '{library}'\n")
    python.chmod(0o755)
    assert launcher.of_library(str(python)) == plugin


def test_the_mpi_that_is_installed_here_is_asked() -> None:
    wheels = {wheel.name for wheel in metadata.distributions()}
    assert launcher.of_library() == ("pmi2" if "mpich" in wheels else "pmix")


def test_it_is_asked_only_where_nobody_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_MPI_TYPE", raising=False)
    monkeypatch.setattr(launcher, "of_library", lambda: "pmi2")
    over_mpi, slurm = JobConfig(dist=DistConfig(backend="mpi")), FakeSlurm()
    assert launcher.mpi_plugin(over_mpi, slurm) == "pmi2"
    assert launcher.mpi_plugin(JobConfig(), slurm) is None
    monkeypatch.setattr(slurm, "settings", lambda: Settings(mpi_default="pmix"))
    assert launcher.mpi_plugin(over_mpi, slurm) is None
    monkeypatch.setattr(slurm, "settings", Settings)
    monkeypatch.setenv("SLURM_MPI_TYPE", "cray_shasta")
    assert launcher.mpi_plugin(over_mpi, slurm) is None


def test_without_a_python_that_answers_it_is_pmix(tmp_path: Path) -> None:
    assert launcher.of_library(str(tmp_path / "none")) == "pmix"
