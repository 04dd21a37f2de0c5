"""What tests of the supervisor start with. Modules ask for it by name."""

import signal
from collections.abc import Iterator

import pytest

from tests.process_limits import ChangeLimits
from toolkit.nodes.agent.die_with_parent import SIGNALS
from toolkit.plugins.testing.fake_slurm import FakeSlurm
from toolkit.run.job import slurm_job


@pytest.fixture
def quick(change_limits: ChangeLimits) -> Iterator[None]:
    """Shorten the patience, and restore the test runner's signal handlers at the end."""
    change_limits(error_reports_s=0.01, kill_again_s=0.05, first_pause_s=0.0)
    before = {number: signal.getsignal(number) for number in (*SIGNALS, signal.SIGCONT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def slurm() -> FakeSlurm:
    """Return a Slurm whose job 1 runs on three nodes."""
    slurm = FakeSlurm()
    slurm.start(slurm.sbatch(["job.sh"]), "node[1-3]")
    return slurm


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all nodes but ``dead`` answer."""
    monkeypatch.setattr(slurm_job, "unreachable", lambda hosts, port, here, timeout_s: set(hosts) & {"dead"})
