"""Everything that involves several ranks: the process group, common stops, and shares of batches."""
