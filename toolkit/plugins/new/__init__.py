"""A first project of one's own."""
