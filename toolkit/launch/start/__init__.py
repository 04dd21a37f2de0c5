"""Starts agents, the store and the ranks of an attempt."""
