"""Finds scripts that hang although they report nothing to the toolkit, as those of `toolkit exec`."""
