"""One update of the weights from gradients, with clipping, pruning, averages and skipped steps."""
