"""What holds of every test: its umask is restored, and of long families ``make test`` runs a sample."""

from __future__ import annotations

import gc
import os
import random
import sys
from collections import defaultdict
from collections.abc import Iterator

import pytest

#: Draws the sample; the same in all workers of one run.
SEED_VARIABLE = "TOOLKIT_SAMPLE_SEED"


def pytest_configure() -> None:
    os.environ.setdefault(SEED_VARIABLE, str(random.randrange(10**6)))  # before the workers start, which inherit it
    os.environ.pop("COLUMNS", None)  # xdist sets it in its workers: texts would be wrapped there and not elsewhere
    # Without bytecode each worker and each process of a test would compile what it imports again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    gc.disable()  # until all modules are imported: searches for garbage would take a sixth of that time, and find none


def pytest_collection_finish() -> None:
    """Leave torch's million objects out of every later search for garbage."""
    gc.enable()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # or libraries complain at the end of what they leaked


def pytest_report_header() -> str:
    return f"sample of long families: {SEED_VARIABLE}={os.environ[SEED_VARIABLE]}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of each family that is marked ``sample(count)``, a module or a function with its cases, ``make test`` runs
    ``count`` members with a fresh seed; the others are for ``make soak``. Whoever names a test gets it."""
    if config.option.markexpr != "not soak":
        return
    families: dict[tuple[str, int], list[pytest.Item]] = defaultdict(list)
    for item in items:
        for node, mark in item.iter_markers_with_node("sample"):
            family = item.nodeid.partition("[")[0] if node is item else node.nodeid
            families[family, mark.args[0]] += [item] * (item.get_closest_marker("soak") is None)
    for (family, count), members in families.items():
        dice = random.Random(f"{family} {os.environ[SEED_VARIABLE]}")
        for item in dice.sample(members, max(len(members) - count, 0)):
            item.add_marker(pytest.mark.soak)


@pytest.fixture(autouse=True)
def umask_as_before() -> Iterator[None]:
    """A rank or a supervisor that runs in this process sets 077, and a box made after that is root's alone."""
    before = os.umask(0o022)
    os.umask(before)
    yield
    os.umask(before)
