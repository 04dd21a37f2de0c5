"""What a site is like: its checks, its defaults, the proof that runs come back there."""
