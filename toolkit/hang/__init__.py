"""Hangs: which rank the others wait for, and what each rank does, by their stacks."""
