"""The commands about trained models."""
