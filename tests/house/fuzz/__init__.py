"""Odd inputs of every kind: each is refused with a clear error, named, or accepted.

None ends in a traceback. A unit run takes a sample with a fresh seed, `make fuzz` thousands. ``TOOLKIT_FUZZ_SEED=N``
repeats a run.
"""
