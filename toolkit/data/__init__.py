"""Data: which sample comes when, how it is loaded, and where data sets come from.

``permutation`` and ``sampler`` decide which samples form a global batch. ``loader`` and ``workers`` fetch them,
and ``datasets`` builds the data sets.
"""
