"""Everything that involves several ranks at once: process group, stopping together, and how a batch is shared."""
