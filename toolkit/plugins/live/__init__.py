"""What users ask of ranks that train: other values of the config, see docs/live.md."""
