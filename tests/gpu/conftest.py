"""Writes the record of the tests that have run."""

import os
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from tests.gpu import figures

REASON = "reason"  #: of a report's properties; the others are figures
#: Notes a figure of the running test by name.
Note = Callable[[str, float], None]


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # a worker of xdist only makes reports
        config.pluginmanager.register(Record())


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Note:
    """Take the figures of a test. The record has them whether the test passes or fails."""
    return lambda name, value: request.node.user_properties.append((name, float(value)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    reason = ""
    if report.skipped:
        reason = str(report.longrepr[2]).removeprefix("Skipped: ")  # type: ignore[index]
    elif call.excinfo is not None:
        lines = call.excinfo.exconly().strip().splitlines()
        # A rank's error is a traceback, whose end says what it is.
        reason = f"{lines[0]} {lines[-1]}" if lines[0].endswith(":") else lines[0]
    report.user_properties = [*report.user_properties, (REASON, reason)]
    return report


class Record:
    """Keep the tests' reports, also from xdist's workers, and write the record."""

    def __init__(self) -> None:
        self._tests: list[figures.Tested] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            properties: dict[str, object] = dict(report.user_properties)
            reason = str(properties.pop(REASON, ""))
            measured = {key: float(str(value)) for key, value in properties.items()}
            name = report.nodeid.rpartition("/")[2]
            self._tests.append(figures.Tested(name, report.outcome, report.duration, measured, reason))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        path = os.environ.get(figures.VARIABLE)
        has_run = any(tested.outcome != "skipped" for tested in self._tests)
        if self._tests and not has_run:  # without a GPU nothing is proved
            session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
        if path is not None and has_run:
            figures.write(self._tests, figures.machine(), Path(path))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    path = os.environ.get(figures.VARIABLE)
    if path is not None and (table := Path(path).with_suffix(".md")).exists():
        terminalreporter.write("\n" + table.read_text())
