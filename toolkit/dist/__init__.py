"""Everything that knows about several ranks at once: process group, stopping together, and how a batch is shared."""
