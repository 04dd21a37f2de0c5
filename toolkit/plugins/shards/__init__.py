"""Data in large files (shards) of many samples, read as an indexed data set.

An index says how many samples each block of each file holds (index.py). A block is what is read at once: a row group of
Parquet, a few megabytes of a tar, of an MDS shard or of tokens. The order of an epoch goes through the blocks one by
one in each of several lanes (order.py), so files are read in large pieces, and yet the order is a function of the seed
and the position alone.
"""
