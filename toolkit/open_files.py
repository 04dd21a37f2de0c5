"""How many files and sockets this process may have open.

Most systems set a soft limit of 1,024 and a hard one that is far higher, which a process may claim by itself. The soft
limit stands for programs that use ``select``, so it is raised only where many descriptors are needed.
"""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Iterator


def hard_limit() -> int:
    """The number of descriptors that this process can claim."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return sys.maxsize if hard == resource.RLIM_INFINITY else hard


def claim_all() -> None:
    """Raise the soft limit of this process to the hard one."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextlib.contextmanager
def all_claimed() -> Iterator[None]:
    """Inside, the soft limit is the hard one; afterwards it is as before, for the programs that are started then."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    claim_all()
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
