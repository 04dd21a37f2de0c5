"""The commands of the report."""
