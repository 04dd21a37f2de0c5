"""The copies of packages on the node's disk, made by :mod:`toolkit.staging.copying` in a separate process."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from toolkit import logs, staging
from toolkit.agent.helpers import Helpers
from toolkit.agent.link import Message

COPY_COMMAND = (sys.executable, "-P", "-m", "toolkit.staging.copying")

log = logs.get(__name__)


@dataclass
class NodeCopies:
    """The copies on this node that processes are started with, see :mod:`toolkit.staging`."""

    paths: dict[str, str] = field(default_factory=dict)  #: the copy of each original

    def environment(self, environ: Mapping[str, str]) -> Mapping[str, str]:
        """Return the variables of a process that uses the copies."""
        return staging.environment(self.paths, environ) if self.paths else environ

    def program(self, program: str) -> str:
        """Return the program of the environment's copy, or of the environment itself if that has none."""
        copy = staging.moved(Path(program), self.paths)
        return program if copy == Path(program) else str(copy)


def start(helpers: Helpers, request: Message, take: Callable[[Message], None], tries: int = 2) -> None:
    """Copy packages in a separate process, which holds the copies until this one ends; ``take`` gets its answer.

    The process may be killed: then it is started once more. One that cannot be started is a problem in the answer.
    """

    def hear(text: bytes) -> None:
        if not text and tries > 1:
            log.warning("the copying to this node's disk has ended without an answer: trying again")
            start(helpers, request, take, tries - 1)
            return
        answer: Message = {"copies": {}, "problems": ["the copying was killed: see the agent's log"]}
        with contextlib.suppress(ValueError):
            answer = json.loads(text)
        take(answer)

    try:
        helpers.ask(COPY_COMMAND, hear, json.dumps(request).encode())
    except OSError as error:
        take({"copies": {}, "problems": [str(error)]})
