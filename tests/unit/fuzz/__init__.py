"""Odd inputs of every kind: each ends in a clear error, is named, or is accepted; none ends in a traceback.

A unit run takes a sample with a fresh seed, `make fuzz` thousands. ``TOOLKIT_FUZZ_SEED=N`` repeats a run.
"""
