"""Processes that work for the agent.

A process may wait for ever for a disk, a file server or a driver; the agent must not.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from toolkit.base import logs
from toolkit.files import records
from toolkit.nodes.agent.die_with_parent import die_with, ignore_signals

T = TypeVar("T")
log = logs.get(__name__)


def start_child(
    command: Sequence[str], prepare: Callable[[], None] = lambda: None, **options: Any
) -> subprocess.Popen[bytes]:
    """Start a process that dies with the agent, which reaps it. ``prepare`` runs in it first. Raises OSError."""
    agent = os.getpid()

    def begin() -> None:  # safe: this process has one thread
        die_with(agent, signal.SIGKILL)
        ignore_signals()  # Slurm may send them to all processes of a job
        prepare()

    process = subprocess.Popen(command, preexec_fn=begin, **options)
    process.returncode = 0  # so that Popen does not reap it
    return process


def parsed(text: bytes, kind: type[T]) -> T | None:
    """Return what a helper has printed, parsed. None, with a warning, if it is cut off or is not of this ``kind``."""
    try:
        return records.decode(kind, json.loads(text))
    except (ValueError, RecursionError) as error:
        log.warning("the answer of a helper that is none was ignored (%s): %.80r", error, text)
        return None


class Helpers:
    """The agent's living helpers. They end with the agent, which reaps them."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self.selector = selector
        self.pids: set[int] = set()

    def start(
        self,
        command: Sequence[str],
        hear: Callable[[bytes], bool] | None = None,
        given: bytes = b"",
    ) -> int:
        """Start a process that reads ``given``; return its pid. Its output goes to ``hear``, else to the agent's log.

        ``hear`` gets empty bytes at its end, and returns whether it wants more. Raises OSError.
        """
        output_to = subprocess.PIPE if hear else None
        process = start_child(command, stdin=subprocess.PIPE, stdout=output_to)
        self.pids.add(process.pid)
        assert process.stdin is not None
        # A helper that has ended already reads nothing.
        with contextlib.suppress(OSError), process.stdin as asked:
            asked.write(given)
        output = process.stdout
        if hear is None or output is None:
            return process.pid

        def read() -> None:
            data = os.read(output.fileno(), 1 << 16)
            try:
                hears_more = hear(data)
            except Exception as error:  # of what asked for it, which must not end the agent
                log.error("the output of %s is not heard any more: %r", " ".join(command), error)
                hears_more = False
            if not hears_more or not data:
                self.selector.unregister(output)
                output.close()

        self.selector.register(output, selectors.EVENT_READ, read)
        return process.pid

    def ask(
        self,
        command: Sequence[str],
        take: Callable[[bytes], None],
        given: bytes = b"",
        *,
        awaits_end: bool = True,
    ) -> None:
        """Start a process; ``take`` gets all its output when it has ended. Raises OSError.

        Without ``awaits_end`` it gets the first line: the end may wait for a thread in the kernel.
        """
        text = bytearray()

        def hear(data: bytes) -> bool:
            text.extend(data)
            is_over = not data or (not awaits_end and text.endswith(b"\n"))
            if is_over:
                take(bytes(text))
            return not is_over

        self.start(command, hear, given)

    def ask_if_possible(self, command: Sequence[str], take: Callable[[bytes], None], given: bytes = b"") -> None:
        """Start a process as :meth:`ask` does, but log an OSError: the ranks do without."""
        try:
            self.ask(command, take, given)
        except OSError as error:
            log.warning("%s cannot be started: %s", " ".join(command), error)
