"""Records of a rank's steps: a profile that a user asks for, and a trace for the comparison of two runs."""
