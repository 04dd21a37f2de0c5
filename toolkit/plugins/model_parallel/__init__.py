"""Models that several ranks hold together: the strategies pipeline and tensor."""
