"""Messages between pairs of ranks: the base of the parameter server.

Each pair of ranks has its own connection (gloo's, in a process group made for it). One thread for each peer reads from
it, and all messages go into one queue. So no rank waits for a certain peer, and a peer's death is one more message. A
send never blocks for long, since the other end always reads.
"""

from __future__ import annotations

import json
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.base.errors import ToolkitError

#: gloo closes all pairs of a group if one wait runs out, and a peer may be silent through a long evaluation. Finding a
#: rank that hangs is the supervisor's task.
FOREVER = timedelta(days=365)
#: The seconds to wait for each peer's last message: all ranks leave at about the same time.
LEAVE_S = 10.0


class Kind(IntEnum):
    """What a message is."""

    PUSH = 0  #: worker to server: gradients
    WEIGHTS = 1  #: server to worker
    SUM = 2  #: to rank 0, which answers SUMMED
    SUMMED = 3
    SYNC = 4  #: to rank 0, which answers SYNCED with the buffers: all steps up to here are done
    SYNCED = 5
    TELL = 6  #: rank 0 to all: values that are equal on all ranks
    BYE = 7  #: the sender's last message
    LOST = 8  #: never sent: the sender is dead


class PeerMessage(NamedTuple):
    """A message from ``sender``: some ``numbers``, and bytes (n,) uint8 if the kind has any."""

    kind: Kind
    sender: int
    numbers: tuple[float, ...] = ()
    payload: Tensor | None = None


#: Numbers in a header besides the kind and the number of bytes that follow: float64, exact for counts up to 2**53.
_NUMBERS = 7


class PeerMessenger:
    """One rank's connections to ``peers``. Every rank of the default group makes one: making it is a collective.

    LOST is received after all that a dead peer had sent. Only one thread may send and receive.
    """

    def __init__(self, peers: Iterable[int]) -> None:
        self._unreachable: set[int] = set()
        group = dist.new_group(backend="gloo", timeout=FOREVER)
        assert isinstance(group, dist.ProcessGroup)  # this rank is in it, as all are
        self.group = group
        self._queue: SimpleQueue[PeerMessage] = SimpleQueue()
        self._threads = {
            peer: threading.Thread(target=self._read, args=[peer], name=f"toolkit-mail-{peer}", daemon=True)
            for peer in peers
        }

    def open(self) -> None:
        """Start to read messages."""
        for thread in self._threads.values():
            thread.start()

    def send(self, peer: int, kind: Kind, numbers: Sequence[float] = (), payload: Tensor | None = None) -> None:
        """Send a message; return when the memory of ``payload`` may be used again. Nothing is sent to a dead peer."""
        if peer in self._unreachable:
            return
        size = 0 if payload is None else payload.numel()
        header = [float(kind), float(size), *numbers, *[0.0] * (_NUMBERS - len(numbers))]
        try:
            # The header has a fixed size and says how many bytes follow.
            dist.send(torch.tensor(header, dtype=torch.float64), peer, group=self.group)
            if payload is not None and size:
                dist.send(payload, peer, group=self.group)
        except RuntimeError:
            self._unreachable.add(peer)  # the thread that reads from it gets an error as well

    def send_all(self, kind: Kind, payload: Tensor) -> None:
        """Send a message to every peer."""
        for peer in self._threads:
            self.send(peer, kind, payload=payload)

    def receive(self) -> PeerMessage:
        """Return the next message of any peer. Those of one peer come in the order in which they were sent."""
        return self._queue.get()

    def close(self, *, orderly: bool) -> None:
        """Leave. Peers take a rank that leaves without ``orderly`` for dead."""
        if not orderly:
            return
        for peer in self._threads:
            self.send(peer, Kind.BYE)
        for thread in self._threads.values():
            if thread.is_alive():
                thread.join(LEAVE_S)

    def _read(self, peer: int) -> None:
        header = torch.empty(2 + _NUMBERS, dtype=torch.float64)
        try:
            while True:
                dist.recv(header, peer, group=self.group)
                kind, size, *numbers = header.tolist()
                if kind == Kind.BYE:
                    return
                payload = torch.empty(int(size), dtype=torch.uint8) if size else None
                if payload is not None:
                    dist.recv(payload, peer, group=self.group)
                self._queue.put(PeerMessage(Kind(int(kind)), peer, tuple(numbers), payload))
        except RuntimeError:
            # gloo raises when the connection breaks: the peer has died.
            self._queue.put(PeerMessage(Kind.LOST, peer))


def encode(value: Any) -> Tensor:
    """Return ``value``, which must be JSON, as a payload."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def decode(message: PeerMessage) -> Any:
    """Return the value that :func:`encode` was given."""
    assert message.payload is not None
    return json.loads(message.payload.numpy().tobytes())


@dataclass(frozen=True)
class PushHeader:
    """What a worker sends with a ticket's gradient, which is that of ``loss``."""

    step: int
    share: int
    version: int  #: of the weights with which it was computed
    loss: float  #: the sum over its samples, divided by ``assumed``
    weight: float  #: the weight of that sum; without weights, the number of samples
    samples: int
    assumed: int  #: samples of the global batch

    @property
    def part(self) -> float:
        """Return its part of the global batch."""
        return self.samples / self.assumed

    @staticmethod
    def of(message: PeerMessage) -> PushHeader:
        step, share, version, loss, weight, samples, assumed = message.numbers
        return PushHeader(int(step), int(share), int(version), loss, weight, int(samples), int(assumed))


Handler: TypeAlias = Callable[[PeerMessage], None]


class PeerInbox:
    """Hands messages to the ``handlers`` of their kinds as they come. Other kinds are kept until they are awaited.

    Every method raises ToolkitError when a peer has died, after all that it had sent.
    """

    def __init__(self, mail: PeerMessenger, handlers: Mapping[Kind, Handler]) -> None:
        self._mail, self._handlers = mail, handlers
        self._waiting: defaultdict[Kind, deque[PeerMessage]] = defaultdict(deque)

    def handle_next(self) -> None:
        """Wait for the next message, and handle or keep it."""
        message = self._mail.receive()
        if message.kind is Kind.LOST:
            raise ToolkitError(f"rank {message.sender} is gone; see its log")
        if message.kind in self._handlers:
            self._handlers[message.kind](message)
        else:
            self._waiting[message.kind].append(message)

    def wait_for(self, kind: Kind) -> PeerMessage:
        """Return the next message of ``kind``."""
        while not self._waiting[kind]:
            self.handle_next()
        return self._waiting[kind].popleft()

    def gather(self, kind: Kind, senders: Collection[int]) -> list[PeerMessage]:
        """Return a message of ``kind`` from each of ``senders``, in rank order."""
        received: dict[int, PeerMessage] = {}
        while len(received) < len(senders):
            message = self.wait_for(kind)
            received[message.sender] = message
        return [received[rank] for rank in sorted(received)]
