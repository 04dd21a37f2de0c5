"""The messages between supervisor and agents, as bytes."""

import json

import pytest

from toolkit.files.records import SchemaError
from toolkit.nodes.agent import messages
from toolkit.nodes.agent.reports import ProgressSummary, RankProgress

#: A variable, or a path, of a user whose bytes are not UTF-8.
ODD = b"caf\xe9".decode(errors="surrogateescape")


@pytest.mark.parametrize(
    "message",
    [
        messages.Heartbeat(),
        messages.AgentHere("node1", 3, again=True),
        messages.CheckOrder(("true",), request=7),
        messages.CheckAnswered(7, "well\n", 1.0, 2.5),
        messages.NodeAlive(ProgressSummary(1, 8, 0, 12, None, 7), {"since": 1.5, "gpus": []}),
        messages.NodeAlive(),
        messages.StacksOrder(
            1, ("cat",), "/run", (RankProgress(0, None, None, 1.0, is_silent=False),), outside=True, request=1
        ),
        messages.StartOrder(
            1, None, ("sh",), {"A": ODD}, ("B",), (messages.ProcessSpec(None, {}, ODD),), 2, 1, gets_signals=True
        ),
        messages.ProcessEnded(1, 0, -9, out_of_memory=False, time=1.0),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_arrives_as_it_was_sent(message: messages.Message) -> None:
    assert messages.decoded(messages.encoded(message)) == message


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b'["Heartbeat"]', b'["NoMessage", {}]', b'["Message", {}]', b"\xff"]
)
def test_what_is_no_message_is_refused(content: bytes) -> None:
    with pytest.raises(SchemaError, match="is not a message"):
        messages.decoded(content)


def test_a_message_with_a_wrong_field_is_refused_with_its_key() -> None:
    with pytest.raises(SchemaError, match=r"^code: "):
        messages.decoded(json.dumps(["ProcessEnded", {"attempt": 1, "rank": 0, "code": "x"}]).encode())
