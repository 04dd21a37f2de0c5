"""Helps to test code that uses the toolkit: a Slurm in memory, and faults.

    slurm = FakeSlurm()
    slurm.preempt(slurm.sbatch(["--requeue", "job.sh"]))

``watch`` sees each operation on a file before it is done, and may raise at that exact point. ``CHAOS_VARIABLE`` names
the environment variable that makes a rank of a real run fail: see docs/lifecycle.md.
"""

from toolkit.plugins.testing.fake_slurm import FakeSlurm
from toolkit.plugins.testing.faults import CHAOS_VARIABLE, hook_disk_operations

__all__ = ["CHAOS_VARIABLE", "FakeSlurm", "hook_disk_operations"]
