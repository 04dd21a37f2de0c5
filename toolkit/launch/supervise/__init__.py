"""The supervisor: one attempt after another, and what the end of each means."""
