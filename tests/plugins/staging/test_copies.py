"""The agent's copies of packages. A helper's answer may be cut off or be no answer at all."""

from __future__ import annotations

import json
import os
import selectors
import sys
import time
from typing import Any

import pytest

from toolkit.nodes.agent.helpers import Helpers
from toolkit.nodes.agent.link import Message
from toolkit.plugins.staging import node_side as copies

ORDER: Message = {"request": {}}
WHOLE = {"copies": {"/data": "/tmp/copy"}, "problems": [], "damaged": [], "took_s": 1.5}


def printing(text: str) -> tuple[str, ...]:
    return sys.executable, "-I", "-S", "-c", f"print({text!r})"


class Serving:
    """The part of an agent that keeps copies, and the messages that it sends."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.helpers = Helpers(self.selector)
        self.copies: dict[str, str] = {}
        self.is_held = False
        self.sent: list[Message] = []
        played: Any = self  # in place of Processes
        self.keeper = copies.CopyKeeper(self.helpers, played, self.sent.append)

    def hold(self, wait_s: float) -> None:
        self.is_held = True

    def use_copies(self, paths: dict[str, str]) -> None:
        self.copies |= paths
        self.is_held = False

    def serve(self) -> None:
        end = time.monotonic() + 30
        while self.selector.get_map() and time.monotonic() < end:
            for key, _ in self.selector.select(1):
                key.data()
        for pid in self.helpers.pids:
            os.waitpid(pid, 0)


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(WHOLE)[:-30],
        "[1, 2]",
        "null",
        '{"copies": []}',
        '{"copies": {"/data": 3}, "problems": []}',
        "[" * 10**5,
    ],
    ids=["cut off", "a list", "null", "no object", "no text", "deep"],
)
def test_an_answer_about_copies_that_is_none_is_ignored_with_a_warning(
    text: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(copies, "COPY_COMMAND", printing(text))
    agent = Serving()
    agent.keeper.stage({**ORDER, "wait_s": 60.0})
    agent.serve()
    assert (agent.copies, agent.is_held) == ({}, False)  # the ranks need not wait
    assert agent.sent[0]["copies"] == {}
    assert "the copying was killed" in agent.sent[0]["problems"][0]
    assert "the answer of a helper that is none was ignored" in caplog.text


@pytest.mark.parametrize(
    ("text", "left"),
    [(json.dumps({"/data": "/tmp/copy"}), {"/data": "/tmp/copy"}), ("{}", {}), ('{"/data": "/t', {}), ("3", {})],
)
def test_without_a_certain_answer_no_copy_is_used(
    text: str, left: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "COPY_COMMAND", printing(json.dumps(WHOLE)))
    monkeypatch.setattr(copies, "CHECK_COMMAND", printing(text))
    agent = Serving()
    agent.keeper.stage({**ORDER, "wait_s": 0.0})
    agent.serve()
    agent.keeper.check()
    assert not agent.selector.get_map(), "it was whole a moment ago"
    monkeypatch.setattr(copies, "SEEN_FOR_S", 0.0)
    agent.keeper.check()
    assert (agent.copies, agent.is_held) == ({}, True)
    # serve() has waited for the copying process already
    agent.helpers.pids.clear()
    agent.serve()
    assert (agent.copies, agent.is_held) == (left, False)
    assert agent.sent[0] == {"is": "staged", **WHOLE}
    assert len(agent.sent) == (1 if left else 2)
