"""Makes a new run: its folder, its copy of the sources, the checks before anything is queued."""
