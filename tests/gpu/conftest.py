"""Writes the record of the tests that have run."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from tests.gpu import figures

TESTED = pytest.StashKey[list[figures.Tested]]()
#: Notes a figure of the running test by name.
Note = Callable[[str, float], None]


def pytest_configure(config: pytest.Config) -> None:
    config.stash[TESTED] = []


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Note:
    """Take the figures of a test, which are in the record whether it passes or fails."""
    return lambda name, value: request.node.user_properties.append((name, float(value)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call" or report.outcome != "passed":
        name = item.nodeid.rpartition("/")[2]
        measured = {key: float(str(value)) for key, value in report.user_properties}
        reason = ""
        if report.skipped:
            reason = str(report.longrepr[2]).removeprefix("Skipped: ")  # type: ignore[index]
        elif call.excinfo is not None:
            lines = call.excinfo.exconly().strip().splitlines()
            # A rank's error is a traceback, whose end says what it is.
            reason = f"{lines[0]} {lines[-1]}" if lines[0].endswith(":") else lines[0]
        tested = figures.Tested(name, report.outcome, call.duration, measured, reason)
        item.config.stash[TESTED].append(tested)
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    path, tests = os.environ.get(figures.VARIABLE), session.config.stash[TESTED]
    has_run = any(tested.outcome != "skipped" for tested in tests)
    if tests and not has_run:  # without a GPU nothing is proved
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
    if path is not None and has_run:
        figures.write(tests, figures.machine(), Path(path))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    path = os.environ.get(figures.VARIABLE)
    if path is not None and (table := Path(path).with_suffix(".md")).exists():
        terminalreporter.write("\n" + table.read_text())
