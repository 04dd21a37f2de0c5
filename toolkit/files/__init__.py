"""The run folder, and the record of each of its files."""
