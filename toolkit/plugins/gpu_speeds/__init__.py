"""GPUs that are slower than the others of a job, found before its first attempt. A spare node takes their place."""
