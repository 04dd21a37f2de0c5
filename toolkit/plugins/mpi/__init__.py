"""`dist.backend: mpi` on a torch that was built without MPI, see `toolkit.plugins.mpi.backend`."""
