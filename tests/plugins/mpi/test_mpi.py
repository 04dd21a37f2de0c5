"""The decisions before MPI is opened, and whether it is closed. The group itself is in test_backend_contract.py."""

import os
import signal
import sys
from importlib import metadata
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch.distributed as dist

from tests.process_limits import ChangeLimits
from toolkit.base.errors import ConfigError, RequestError, StoppedError
from toolkit.config import ClusterConfig, DistConfig, JobConfig
from toolkit.config.validation import check_combinations
from toolkit.nodes.start.agents import Events
from toolkit.plugins.mpi import srun_launcher as launcher
from toolkit.plugins.testing.fake_slurm import FakeSlurm
from toolkit.ranks import device
from toolkit.run.supervise.rank_stop import StopAsked
from toolkit.slurm.commands import Settings
from toolkit.slurm.container import Container, parse

pytest.importorskip("mpi4py")


@pytest.fixture
def finalized(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the calls of Finalize, for an MPI that is open."""
    from mpi4py import MPI

    calls: list[str] = []

    monkeypatch.setattr(MPI, "Is_initialized", lambda: True)
    monkeypatch.setattr(MPI, "Is_finalized", lambda: bool(calls))
    monkeypatch.setattr(MPI, "Finalize", lambda: calls.append("Finalize"))
    return calls


def test_ranks_that_mpi_does_not_know_or_numbers_otherwise_are_told_how_to_start() -> None:
    from toolkit.plugins.mpi.backend.group import check_world

    check_world((1, 4), (1, 4), "Open MPI v5.0.11, package: Open MPI somebody@somewhere")
    with pytest.raises(ConfigError, match=r"rank 1 of 4 is rank 0 of 1 .*\(Open MPI v5\.0\.11\).*mpirun.*--mpi=pmix"):
        check_world((1, 4), (0, 1), "Open MPI v5.0.11, package: Open MPI somebody@somewhere")
    with pytest.raises(ConfigError, match="rank 1 of 4 is rank 2 of 4"):
        check_world((1, 4), (2, 4), "Open MPI v5")


def test_mpi_is_closed_after_a_success_and_a_stop_but_not_after_a_failure(finalized: list[str]) -> None:
    """Finalize waits for all ranks: after a failure that is for ever."""
    from toolkit.plugins.mpi import backend as mpi

    mpi.finalize(ValueError, ValueError("mine"), None)
    assert finalized == []
    mpi.finalize(StoppedError, StoppedError("all together"), None)
    assert finalized == ["Finalize"]
    mpi.finalize(None, None, None)
    assert finalized == ["Finalize"]


def test_ranks_over_mpi_have_no_components() -> None:
    config = JobConfig(cluster=ClusterConfig(components=[{}, {}]), dist=DistConfig("mpi"))
    with pytest.raises(ConfigError, match=r"cluster\.components: dist\.backend: mpi needs one step of srun"):
        check_combinations(config)


def test_importing_the_backend_opens_nothing() -> None:
    assert device.choose_backend("mpi") == "mpi4py"
    from mpi4py import MPI  # only now: its own first import opens MPI

    assert not MPI.Is_initialized()


def test_a_torch_with_mpi_of_its_own_uses_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_mpi_available", lambda: True)
    assert device.choose_backend("mpi") == "mpi"


def test_a_missing_mpi4py_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "toolkit.plugins.mpi.backend", raising=False)
    monkeypatch.delattr("toolkit.plugins.mpi.backend", raising=False)
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ConfigError, match=r"pip install slurm-batch-toolkit\[mpi\]"):
        device.choose_backend("mpi")


def test_auto_never_picks_mpi() -> None:
    assert device.choose_backend("auto") in ("nccl", "gloo")


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
    assert launcher.detect_pmi(str(python)) == plugin


def test_the_mpi_that_is_installed_here_is_asked() -> None:
    wheels = {wheel.name for wheel in metadata.distributions()}
    assert launcher.detect_pmi() == ("pmi2" if "mpich" in wheels else "pmix")


def test_it_is_asked_only_where_nobody_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_MPI_TYPE", raising=False)
    monkeypatch.setattr(launcher, "detect_pmi", lambda: "pmi2")
    over_mpi, slurm = JobConfig(dist=DistConfig(backend="mpi")), FakeSlurm()
    assert launcher.mpi_plugin(over_mpi, slurm) == "pmi2"
    assert launcher.mpi_plugin(JobConfig(), slurm) is None
    monkeypatch.setattr(slurm, "settings", lambda: Settings(mpi_default="pmix"))
    assert launcher.mpi_plugin(over_mpi, slurm) is None
    monkeypatch.setattr(slurm, "settings", Settings)
    monkeypatch.setenv("SLURM_MPI_TYPE", "cray_shasta")
    assert launcher.mpi_plugin(over_mpi, slurm) is None


def test_without_a_python_that_answers_it_is_pmix(tmp_path: Path) -> None:
    assert launcher.detect_pmi(str(tmp_path / "none")) == "pmix"


#: An srun whose container does not start. It ignores SIGTERM, as srun does until it has set its handlers.
HANGS = "#!/bin/sh\ntrap '' TERM\nexec sleep 600\n"


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_store_host_that_does_not_start_in_its_container_is_given_up(
    tmp_path: Path, change_limits: ChangeLimits, is_stopped: bool
) -> None:
    """Before, the supervisor waited for ever, and heard of nothing meanwhile."""
    change_limits(zygote_imports_s=600.0 if is_stopped else 0.5, kill_again_s=0.5)
    (tmp_path / "srun").write_text(HANGS)
    (tmp_path / "srun").chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    container = Container(parse("pyxis:/image.sqsh"), (), workdir="/", code="/code")
    log = tmp_path / "store.log"
    events: Events = SimpleQueue()
    if is_stopped:
        events.put(StopAsked(signal.SIGTERM))
    error = StoppedError if is_stopped else RequestError
    says = "as the run is to stop" if is_stopped else f"did not start in the container within 0 s: {log} says why"
    with pytest.raises(error, match=says):
        launcher.StoreHost(1, "127.0.0.1", environ, events, log, container)
    assert events.qsize() == is_stopped  # the supervisor takes it
