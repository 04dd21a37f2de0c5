"""What every unit test finds: the package's log as it is before anybody has set it up."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from toolkit.logs import LOGGER


@pytest.fixture(autouse=True)
def log_as_at_the_start() -> Iterator[None]:
    """A test that calls ``logs.setup`` would take the log away from the ``caplog`` of all that come after it."""
    before = LOGGER.handlers[:], LOGGER.level, LOGGER.propagate
    LOGGER.handlers[:], LOGGER.propagate = [], True
    LOGGER.setLevel(logging.NOTSET)
    yield
    LOGGER.handlers[:], LOGGER.propagate = before[0], before[2]
    LOGGER.setLevel(before[1])
