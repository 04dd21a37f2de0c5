"""Errors of a box, as the reader of a test report sees them."""


class BoxError(RuntimeError):
    """The box failed to do what it was told. The message ends with the last lines of the log with the reason."""


class BoxUnavailable(BoxError):
    """No box can run on this machine (not root, not Debian, no download). Tests skip with this reason."""
