"""What can go wrong with a box, as the reader of a test report sees it."""


class BoxError(RuntimeError):
    """The box did not do what it was told; the message ends with the last lines of the log that says why."""


class BoxUnavailable(BoxError):
    """No box can stand on this machine (not root, not Debian, no download): tests skip with this reason."""
