"""The warning of loops that number their steps in a way that a resume breaks."""
