"""The plugins that come with the toolkit.

Nothing outside imports them but the public names of `toolkit`, on first use: see `toolkit.registry`.
"""
