"""One module for each command: its help (the docstring), its arguments and its ``run``.

``run`` returns the exit code, or None for 0. It imports what it needs itself: `toolkit --help` loads all these modules.
"""
