"""The number of files and sockets that this process may have open.

Most systems set a soft limit of 1,024 and a far higher hard limit, which a process may claim by itself. The soft limit
exists for programs that use ``select``, so it is raised only where many descriptors are needed.
"""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Iterator


def hard_limit() -> int:
    """Return the number of descriptors that this process can claim."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return sys.maxsize if hard == resource.RLIM_INFINITY else hard


def claim_all() -> None:
    """Raise the soft limit of this process to the hard one."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextlib.contextmanager
def all_claimed() -> Iterator[None]:
    """Raise the soft limit to the hard one inside the context.

    Afterwards it is as before, for programs that are started then.
    """
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    claim_all()
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
