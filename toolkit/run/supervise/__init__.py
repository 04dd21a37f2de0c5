"""The supervisor: one attempt after another."""
