"""Stop signals: none is lost, none harms a moment at which it comes. None kills a process that has ended well."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from toolkit.base import signals
from toolkit.base.signals import STOP_SIGNALS


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Restore the test runner's own handlers."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_that_came_while_nobody_listened_is_told_to_the_first_who_does(number: signal.Signals) -> None:
    handler, heard = signals.install(), list[str]()
    assert handler.first is None
    signal.raise_signal(number)
    signal.raise_signal(number)
    handler.listen(lambda: heard.append("told"))
    assert heard == ["told"]
    signal.raise_signal(number)
    assert heard == ["told"] * 2


def test_without_a_signal_nobody_is_told_anything() -> None:
    heard: list[str] = []
    signals.install().listen(lambda: heard.append("told"))
    assert heard == []


def test_the_first_signal_is_the_one_that_is_timed() -> None:
    handler = signals.install()
    begun = time.time()
    signal.raise_signal(signal.SIGUSR1)
    first = handler.first
    assert first is not None
    assert begun <= first <= time.time()
    while time.time() == first:
        pass
    signal.raise_signal(signal.SIGTERM)
    assert handler.first == first


def test_a_signal_may_come_while_another_is_handled() -> None:
    handler, heard = signals.install(), list[str]()

    def listener() -> None:
        heard.append("begun")
        if len(heard) == 1:
            signal.raise_signal(signal.SIGUSR2)  # handled before this line is left
        heard.append("done")

    handler.listen(listener)
    signal.raise_signal(signal.SIGTERM)
    assert heard == ["begun", "begun", "done", "done"]


def test_who_no_longer_listens_is_told_nothing() -> None:
    handler, heard = signals.install(), list[str]()
    handler.listen(lambda: heard.append("told"))
    handler.listen(None)
    signal.raise_signal(signal.SIGTERM)
    assert heard == []
    assert handler.first is not None


def test_a_second_install_keeps_the_first_handler_and_what_it_has_noted() -> None:
    first = signals.install()
    signal.raise_signal(signal.SIGTERM)
    assert signals.install() is first
    assert {signal.getsignal(number) for number in STOP_SIGNALS} == {first}


def test_in_a_thread_where_no_handler_can_be_set_nothing_changes_and_nothing_fails() -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with ThreadPoolExecutor(1) as thread:
        assert isinstance(thread.submit(signals.install).result(), signals.StopSignals)
        thread.submit(signals.ignore).result()
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


def test_an_earlier_handler_is_called_after_the_stop_for_the_signals_that_came() -> None:
    called: list[int] = []
    for number in (signal.SIGUSR2, signal.SIGTERM):
        signal.signal(number, lambda number, _: called.append(number))
    signals.install()
    signal.raise_signal(signal.SIGUSR2)
    signal.raise_signal(signal.SIGUSR1)
    assert called == []  # a stop is saved first
    signals.end_stopped()
    assert called == [signal.SIGUSR2]
    signal.raise_signal(signal.SIGUSR2)  # ignored: the process has ended well


def test_a_handler_that_a_script_sets_before_its_loop_is_kept_for_the_end() -> None:
    signals.install()
    signal.raise_signal(signal.SIGUSR1)
    called: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: called.append(number))
    heard: list[str] = []
    signals.install().listen(lambda: heard.append("told"))
    assert heard == ["told"]
    signal.raise_signal(signal.SIGTERM)
    assert (heard, called) == (["told", "told"], [])
    signals.end_stopped()
    assert called == [signal.SIGTERM]


# The object in the main module dies when the interpreter has put back the default actions already.
SHUTDOWN = """
import os, signal, sys
from toolkit.base import signals

class Last:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.{number}):
        kill(pid, number)

signals.install()
last = Last()
{before_the_end}
sys.exit(75)
"""


def exit_code(number: signal.Signals, before_the_end: str) -> int:
    code = SHUTDOWN.format(number=number.name, before_the_end=before_the_end)
    return subprocess.run([sys.executable, "-c", code], timeout=60).returncode


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_during_the_interpreters_shutdown_does_not_change_the_exit_code(number: signal.Signals) -> None:
    assert exit_code(number, "signals.ignore()") == 75


def test_without_ignore_a_signal_during_the_interpreters_shutdown_does_kill() -> None:
    assert exit_code(signal.SIGTERM, "") == -signal.SIGTERM
