"""A real Slurm cluster on one machine, in namespaces.

It has slurmctld, slurmdbd on MariaDB, munged, and a slurmd per node.

with Box(nodes=2) as box:
    box.run(["srun", "-N2", "hostname"]).stdout
"""

from tests.box.cluster import Box
from tests.box.errors import BoxError, BoxUnavailable
from tests.box.namespaces import BoxProcess

__all__ = ["Box", "BoxError", "BoxProcess", "BoxUnavailable"]
