"""Methods of training beside plain data parallelism, one module or folder each."""
