"""`--after`: runs that wait until other runs, or sweeps, have completed."""
