"""Curves beside those of the job: the ranks' own step times, with stragglers, and the attempts of the run."""
