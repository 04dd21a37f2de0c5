"""The lifecycle of a run: submitting it, supervising its ranks, deciding what its end means. Never imports torch."""
