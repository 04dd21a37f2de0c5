"""`toolkit shell`: a shell in an allocation of a run's size, with its environment, folder and sources."""
