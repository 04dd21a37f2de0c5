"""What becomes of gradients: one update of the weights, with clipping, pruning, averages and steps left out."""
