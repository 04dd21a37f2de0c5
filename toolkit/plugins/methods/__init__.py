"""Methods of training other than plain data parallelism, one module or folder each."""
