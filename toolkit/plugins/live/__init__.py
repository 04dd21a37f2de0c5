"""What users ask of ranks that train: other values of the config, and profiles, see docs/live.md."""
