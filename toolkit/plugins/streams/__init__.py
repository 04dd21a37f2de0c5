"""`toolkit.Streams`: data without an index, of which each rank reads its own stream."""
