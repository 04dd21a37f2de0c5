"""What every test leaves as it was: the process's umask."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def umask_as_before() -> Iterator[None]:
    """A rank or a supervisor that runs in this process sets 077, and a box made after that is root's alone."""
    before = os.umask(0o022)
    os.umask(before)
    yield
    os.umask(before)
