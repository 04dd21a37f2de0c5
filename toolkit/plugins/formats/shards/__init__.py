"""Data in large files (shards) of many samples, read as an indexed data set: see index.py and blocks.py."""
