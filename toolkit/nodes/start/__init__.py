"""Starts agents, the store and the ranks of an attempt. The supervisor's side of the agents."""
