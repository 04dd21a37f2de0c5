"""Sweeps: many runs of one config with other values, submitted as job arrays, and looked after by one name."""
