"""Copies shared files to a node's own disk: the Python environment, and what ``data.stage`` names.

A package is one file on the shared disk (:mod:`.archive`). Each node reads it and unpacks it on its own disk
(:mod:`.copying`). The supervisor decides what is copied (:mod:`.supervisor_side`), and the node's agent has it done
(:mod:`.node_side`). A rank finds its node's copies with `toolkit.staged`.
"""
