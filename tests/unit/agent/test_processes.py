"""The processes that an agent starts on its node."""

from __future__ import annotations

import errno
import os
import selectors
from pathlib import Path

import pytest

from toolkit.agent.link import Message
from toolkit.agent.processes import Processes


def test_a_store_without_pipes_is_reported_and_the_agent_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Message] = []
    processes = Processes(selectors.DefaultSelector(), sent.append, None)
    made: list[int] = []
    pipe = os.pipe

    def only_one() -> tuple[int, int]:
        if made:
            raise OSError(errno.EMFILE, "Too many open files")
        made.extend(pipe())
        return made[0], made[1]

    monkeypatch.setattr(os, "pipe", only_one)
    store = {"rank": None, "environ": {}, "log": str(tmp_path / "logs/store.log")}
    common = {"module": None, "command": ["true"], "environ": {}, "unset": [], "cpus_per_task": None}
    processes.start({"attempt": 3, "gets_signals": False, "processes": [store], **common})
    assert sent == [{"is": "not_started", "attempt": 3, "rank": None, "why": "[Errno 24] Too many open files"}]
    for file in made:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(file)
