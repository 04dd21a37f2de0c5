"""`data.bad_samples: skip`: lists the samples that cannot be loaded, and ends a run with too many."""
