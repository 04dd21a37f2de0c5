"""The nodes of a job: an agent on each of them, and what the supervisor does with it."""
