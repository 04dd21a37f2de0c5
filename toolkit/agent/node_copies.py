"""What processes are started with that use this node's copies."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from toolkit import staging


@dataclass
class NodeCopies:
    """The copies on this node that processes are started with, see :mod:`toolkit.staging`."""

    paths: dict[str, str] = field(default_factory=dict)  #: the copy of each original
    awaited_by: float | None = None  #: until when nothing is started, to wait for copies

    def expect(self, wait_s: float) -> None:
        """Have nothing started until copies are there, or ``wait_s`` have passed."""
        self.awaited_by = time.monotonic() + wait_s

    def put_aside(self, wait_s: float) -> dict[str, str]:
        """Return the copies, and use none until it is known which are whole."""
        paths, self.paths = self.paths, {}
        self.expect(wait_s)
        return paths

    def environment(self, environ: Mapping[str, str]) -> Mapping[str, str]:
        """Return the variables of a process that uses the copies."""
        return staging.environment(self.paths, environ) if self.paths else environ

    def program(self, program: str) -> str:
        """Return the program of the environment's copy, or of the environment itself if that has none."""
        copy = staging.moved(Path(program), self.paths)
        return program if copy == Path(program) else str(copy)
