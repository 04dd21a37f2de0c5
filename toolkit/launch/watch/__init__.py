"""Watches nodes, ranks and the batch host while an attempt runs."""
