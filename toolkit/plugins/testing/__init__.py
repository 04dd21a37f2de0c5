"""Helps to test code that uses the toolkit: a Slurm in memory, and faults.

    slurm = FakeSlurm()
    slurm.preempt(slurm.sbatch(["--requeue", "job.sh"]))

``watch`` sees each operation on a file before it is done, and may raise at that exact point. ``CHAOS_VARIABLE`` names
the environment variable that makes a rank of a real run fail: see docs/lifecycle.md.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolkit.plugins.testing.fake_slurm import FakeSlurm
    from toolkit.plugins.testing.faults import CHAOS_VARIABLE, watch

__all__ = ["CHAOS_VARIABLE", "FakeSlurm", "watch"]

_HOMES = {
    "CHAOS_VARIABLE": "toolkit.plugins.testing.faults",
    "FakeSlurm": "toolkit.plugins.testing.fake_slurm",
    "watch": "toolkit.plugins.testing.faults",
}


def __getattr__(name: str) -> Any:
    """Import on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
