"""Token shards, read as windows to train on. `toolkit data tokenize` writes them, or they hold text as bytes."""
