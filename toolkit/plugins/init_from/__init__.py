"""`model.init_from`: weights from a run, a checkpoint, or files of other programs."""
