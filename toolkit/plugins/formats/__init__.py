"""Formats of data: shards, tokens, streams, images."""
