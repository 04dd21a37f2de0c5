"""`dist.backend: mpi` on a torch that was built without MPI."""

from toolkit.registry import Plugin

PLUGIN = Plugin("mpi", backends={"mpi": "toolkit.plugins.mpi.backend"})
