"""Processes that work for the agent.

A process may wait for ever for a disk, a file server or a driver; the agent must not.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

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
    """Return the answer of a helper: the last line that it has printed, parsed.

    Lines before that are of libraries, and go to the log. None, with a warning, if the last one is cut off or is not of
    this ``kind``.
    """
    *others, last = text.splitlines() or [b""]
    for line in others:
        log.warning("a helper has printed: %.200s", line.decode(errors="replace"))
    try:
        return records.decode(kind, json.loads(last))
    except (ValueError, RecursionError) as error:
        log.warning("an invalid answer of a helper was ignored (%s): %.80r", error, last)
        return None


class HelperLines(Generic[T]):
    """Cuts what a helper prints into lines of JSON. Each line of its own is of the type ``kind``."""

    def __init__(self, name: str, kind: type[T]) -> None:
        self._name, self._kind, self._rest = name, kind, b""

    def feed(self, data: bytes) -> list[T]:
        """Return what the lines hold that ``data`` completes. Other lines, of a driver's library say, are logged."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        found = []
        for line in lines:
            try:
                found.append(records.decode(self._kind, json.loads(line)))
            except (ValueError, RecursionError):
                log.warning("the node's %s has printed: %.200s", self._name, line.decode(errors="replace"))
        return found


class Helpers:
    """The agent's living helpers. They end with the agent, which reaps them."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self.selector = selector
        self.pids: set[int] = set()

    def start(
        self,
        command: Sequence[str],
        on_output: Callable[[bytes], bool] | None = None,
        given: bytes = b"",
    ) -> int:
        """Start a process that reads ``given``; return its pid. ``on_output`` gets its output, or the agent's log.

        It gets empty bytes at the end, and returns whether it wants more. Raises OSError.
        """
        output_to = subprocess.PIPE if on_output else None
        # A pipe holds 64 KiB: with more, the agent would wait for a helper that does not read.
        with os.fdopen(os.memfd_create("given"), "w+b") as file:
            file.write(given)
            file.seek(0)
            process = start_child(command, stdin=file, stdout=output_to)
        self.pids.add(process.pid)
        output = process.stdout
        if on_output is None or output is None:
            return process.pid

        def read() -> None:
            data = os.read(output.fileno(), 1 << 16)
            try:
                wants_more = on_output(data)
            except Exception as error:  # of what asked for it, which must not end the agent
                log.error("the output of %s is no longer read: %r", " ".join(command), error)
                wants_more = False
            if not wants_more or not data:
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

        Without ``awaits_end`` it gets all up to a line with an object: the end may wait for a thread in the kernel.
        """
        text = bytearray()

        def on_output(data: bytes) -> bool:
            text.extend(data)
            has_answered = text.endswith(b"\n") and text.splitlines()[-1].startswith(b"{")
            is_over = not data or (not awaits_end and has_answered)
            if is_over:
                take(bytes(text))
            return not is_over

        self.start(command, on_output, given)

    def ask_if_possible(self, command: Sequence[str], take: Callable[[bytes], None], given: bytes = b"") -> None:
        """Start a process as :meth:`ask` does, but log an OSError: the ranks do without."""
        try:
            self.ask(command, take, given)
        except OSError as error:
            log.warning("%s cannot be started: %s", " ".join(command), error)
