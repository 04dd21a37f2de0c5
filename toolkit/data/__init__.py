"""Data: which sample comes when, how it is loaded, and where data sets come from.

``catalog`` answers questions about files without torch; ``permutation`` and ``sampler`` say which samples form a
global batch; ``loader`` and ``workers`` fetch them, ``bad_samples`` counts those that cannot be had; ``stream`` reads
what has no index; ``datasets`` builds the data sets.
"""
