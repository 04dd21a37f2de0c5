"""Copies of the training state in the nodes' memory, for a restart inside the job."""
