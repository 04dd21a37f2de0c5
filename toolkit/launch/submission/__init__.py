"""Makes a run and submits it, from a login node or inside an allocation."""
