"""The plugins that come with the toolkit. Nothing outside imports them: see `toolkit.registry`."""
