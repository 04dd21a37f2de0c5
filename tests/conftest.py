"""Rules for every test: umask, garbage collection, and a sample of long families."""

import gc
import os
import random
import re
import sys
from collections import defaultdict
from collections.abc import Generator, Iterator

import pytest

from tests.process_limits import ChangeLimits
from tests.smoke import SMOKE
from toolkit.base import process_limits, torch_version

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
    """Mark the tests of ``make test``, and leave all but ``count`` members of each family to ``make soak``.

    A family, marked ``sample(count)``, is a module, or a function with its cases. Its members are drawn with a fresh
    seed. A run without ``not soak``, as of a test by its name, leaves none out.
    """
    found = {item.nodeid for item in items if item.nodeid in SMOKE}
    for item in items:
        if item.nodeid in found:
            item.add_marker(pytest.mark.smoke)
    if "smoke" in config.option.markexpr and found != SMOKE:
        raise pytest.UsageError(f"tests/smoke.py names tests that are not there: {', '.join(sorted(SMOKE - found))}")
    if "not soak" not in config.option.markexpr:
        return
    families: dict[tuple[str, int], list[pytest.Item]] = defaultdict(list)
    for item in items:
        for node, mark in item.iter_markers_with_node("sample"):
            family = item.nodeid.partition("[")[0] if node is item else node.nodeid
            is_drawn = item.get_closest_marker("soak") is None and item.nodeid not in SMOKE
            families[family, mark.args[0]] += [item] * is_drawn
    for (family, count), members in families.items():
        dice = random.Random(f"{family} {os.environ[SEED_VARIABLE]}")
        for item in dice.sample(members, max(len(members) - count, 0)):
            item.add_marker(pytest.mark.soak)


@pytest.fixture
def change_limits() -> Iterator[ChangeLimits]:
    """Changes times of this process for a test: ``change_limits(retry_every_s=0.01)``."""
    before = process_limits.limits()
    yield process_limits.override
    process_limits.restore(before)


#: What refuses a thing that an older torch lacks, as a test or its ranks and commands show it.
_REFUSAL = re.compile(r"[^\n:]+(\([^\n]*\)|: \w+): needs torch (\d+)\.(\d+) or newer, and ")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Take a refusal of what this torch lacks for the expected end of a test that uses it.

    Such a test fails in any other way if the thing is not refused by its name. With the newest torch nothing is
    refused, and each test has to pass.
    """
    report = yield
    if report.failed and call.excinfo is not None and (found := _REFUSAL.search(report.longreprtext)):
        version = torch_version.installed() or ""
        if [int(part) for part in version.split(".")[:2]] < [int(found[2]), int(found[3])]:
            report.outcome = "skipped"
            report.wasxfail = f"refused:{found[0]}this is {version}"
    return report


@pytest.fixture(autouse=True)
def process_as_before() -> Iterator[None]:
    """Restore the umask and the import path after each test.

    A rank or a supervisor that runs in this process sets 077: a box made after that would be readable by root only.
    A run's copy of the project comes first on the path: later ranks would import their tests from there.
    """
    umask, path = os.umask(0o022), sys.path[:]
    os.umask(umask)
    yield
    os.umask(umask)
    sys.path[:] = path
