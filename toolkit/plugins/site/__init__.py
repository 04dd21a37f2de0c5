"""Diagnosis: the nodes below a run, and whether its resume is exact."""
