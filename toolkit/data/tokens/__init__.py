"""Token shards: written by `toolkit data tokenize` or from text as bytes, and read as windows to train on."""
