"""Jobs to copy. Each is one short script, which a config names by its dotted path."""
