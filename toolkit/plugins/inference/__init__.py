"""Trained models: evaluation, generation and export."""
