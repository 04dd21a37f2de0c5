"""`notify`: a command of the user that is told how a run has ended."""
