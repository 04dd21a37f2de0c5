"""What every unit test starts with. A log that is not set up, and no module of an earlier test's folder."""

import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp

import pytest
from hypothesis import HealthCheck, settings

from tests.command import command  # noqa: F401
from toolkit.base.logs import LOGGER
from toolkit.files import rundir
from toolkit.files.rundir import RunDir

settings.register_profile(
    "unit", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)  # a busy machine takes longer, and is no failure
settings.load_profile("unit")


def pytest_collection_finish() -> None:
    """Compute with one thread in each worker.

    torch's threads of several workers would wait for each other's CPU, by spinning.
    """
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(autouse=True)
def log_as_at_the_start() -> Iterator[None]:
    """Start each test with a log that is not set up, and restore it.

    A test that calls ``logs.setup`` would take the log from the ``caplog`` of all later tests.
    """
    before = LOGGER.handlers[:], LOGGER.level, LOGGER.propagate
    LOGGER.handlers[:], LOGGER.propagate = [], True
    LOGGER.setLevel(logging.NOTSET)
    yield
    for handler in {*LOGGER.handlers} - {*before[0]}:
        handler.close()
        stream = getattr(handler, "stream", None)
        if isinstance(getattr(stream, "name", None), int):  # a file of `logs.add_file`, opened by its descriptor
            stream.close()
    LOGGER.handlers[:], LOGGER.propagate = before[0], before[2]
    LOGGER.setLevel(before[1])


@pytest.fixture(autouse=True)
def no_modules_of_earlier_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Forget the modules that a test imports from its own folder. The next test may have a module of the same name."""
    before, folder = set(sys.modules), str(tmp_path_factory.getbasetemp())
    yield
    for name in sys.modules.keys() - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(folder):
            del sys.modules[name]


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a new folder for the test.

    pytest's own fixture reads the names of all tests' folders to find a free number.
    """
    name = re.sub(r"\W", "_", request.node.name)[:30]
    return Path(mkdtemp(prefix=name, dir=tmp_path_factory.getbasetemp()))


@pytest.fixture(scope="session")
def cache_folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for all tests' caches, with nothing else in it.

    ``mktemp`` reads the names of all folders beside a new one.
    """
    return tmp_path_factory.mktemp("caches")


@pytest.fixture(autouse=True)
def cache_folder_of_its_own(cache_folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test a cache folder of its own.

    An answer of Slurm in one test must not count in another, and the user's cache is left alone.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", mkdtemp(dir=cache_folders))


@pytest.fixture(autouse=True)
def runs_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the runs of each test into its own folder."""
    monkeypatch.setenv("TOOLKIT_RUNS", str(tmp_path / "runs"))


@pytest.fixture
def run() -> RunDir:
    """Return a run of the name digits, with an empty config."""
    made = rundir.create("digits")
    made.config.write_text("")
    return made
