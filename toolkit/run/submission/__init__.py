"""Submits a run, from a login node or inside an allocation; the handle of a submitted one."""
