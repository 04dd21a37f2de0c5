"""The two ends of a connection understand each other. An end without the secret is refused."""

import secrets

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.nodes.agent.messages import AgentHere, Heartbeat, LeaveOrder, Message, StoreInput
from toolkit.nodes.agent.wire_protocol import AuthenticatedConnection, AuthenticationError

SECRET = b"s" * 32


def pair(secret: bytes = SECRET) -> tuple[AuthenticatedConnection, AuthenticatedConnection]:
    """Return two ends that have greeted each other."""
    supervisor, agent = AuthenticatedConnection(SECRET, "supervisor"), AuthenticatedConnection(secret, "agent")
    assert agent.receive(supervisor.greeting) == ([], b"")
    assert supervisor.receive(agent.greeting) == ([], b"")
    return supervisor, agent


MESSAGES = st.lists(st.builds(StoreInput, st.integers(0, 9), st.text(max_size=50)), max_size=6)
HERE = AgentHere("node1", 3, again=False)


@given(MESSAGES, st.lists(st.integers(1, 90), min_size=1, max_size=40))
def test_messages_arrive_whole_and_in_order_however_they_are_cut(messages: list[StoreInput], sizes: list[int]) -> None:
    supervisor, agent = pair()
    sent, got = b"".join(map(agent.send, messages)), list[Message]()
    while sent:
        piece, sent = sent[: sizes[0]], sent[sizes[0] :]
        sizes = [*sizes[1:], sizes[0]]
        got += supervisor.receive(piece)[0]
    assert got == messages


def test_what_is_said_before_the_greeting_follows_it() -> None:
    supervisor, agent = AuthenticatedConnection(SECRET, "supervisor"), AuthenticatedConnection(SECRET, "agent")
    assert agent.send(HERE) == b""
    assert supervisor.receive(agent.greeting)[0] == []
    _, answer = agent.receive(supervisor.greeting)
    assert supervisor.receive(answer)[0] == [HERE]
    assert supervisor.is_genuine


def test_who_does_not_know_the_secret_is_a_stranger() -> None:
    supervisor, agent = pair(secret=b"t" * 32)
    with pytest.raises(AuthenticationError):
        supervisor.receive(agent.send(HERE))
    assert not supervisor.is_genuine


@given(st.binary(min_size=37, max_size=400))
def test_garbage_is_refused_and_not_kept(garbage: bytes) -> None:
    supervisor = AuthenticatedConnection(SECRET, "supervisor")
    supervisor.receive(secrets.token_bytes(32))
    try:
        assert supervisor.receive(garbage)[0] == []
    except AuthenticationError:
        return
    assert not supervisor.is_genuine


def test_a_message_of_this_or_another_connection_is_not_taken_again() -> None:
    supervisor, agent = pair()
    sent = agent.send(LeaveOrder())
    assert supervisor.receive(sent)[0] == [LeaveOrder()]
    with pytest.raises(AuthenticationError):
        supervisor.receive(sent)
    another, _ = pair()
    with pytest.raises(AuthenticationError):
        another.receive(sent)


def test_a_message_sent_back_to_its_sender_is_not_taken() -> None:
    supervisor, _ = pair()
    with pytest.raises(AuthenticationError):
        supervisor.receive(supervisor.send(LeaveOrder()))
    mirrored = AuthenticatedConnection(SECRET, "supervisor")
    with pytest.raises(AuthenticationError):
        mirrored.receive(mirrored.greeting)


@pytest.mark.parametrize("byte", [0, 3, 4, 20, 36, 40])
def test_a_changed_bit_anywhere_in_a_message_is_noticed(byte: int) -> None:
    supervisor, agent = pair()
    supervisor.receive(agent.send(HERE))
    frame = bytearray(agent.send(Heartbeat()))
    frame[byte] ^= 1
    try:
        assert supervisor.receive(bytes(frame))[0] == []  # a greater length: it is waited for
        with pytest.raises(AuthenticationError):
            supervisor.receive(b"x" * (1 << 16) + b"y" * (1 << 24))
    except AuthenticationError:
        pass


def test_a_stranger_cannot_have_much_kept() -> None:
    supervisor = AuthenticatedConnection(SECRET, "supervisor")
    supervisor.receive(secrets.token_bytes(32))
    with pytest.raises(AuthenticationError, match="16777216 bytes"):
        supervisor.receive((1 << 24).to_bytes(4, "big") + b"\0" * 32)
