"""What servers and workers have in common: which ranks are there, the messages, the state."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.base.errors import ConfigError, StoppedError, listing
from toolkit.config import TrainConfig
from toolkit.config.strategy import ParameterServerConfig
from toolkit.metrics.meters import stopwatch
from toolkit.plugins.methods.parameter_server.messaging import Handler, Kind, PeerInbox, PeerMessenger, decode, encode
from toolkit.ranks.batch import Batch
from toolkit.ranks.collectives import broadcast_tensors, gather_objects
from toolkit.ranks.session import Session
from toolkit.ranks.state import Entry, Json, Replicated, Sharded
from toolkit.strategies.models import refuse_extra_state, to_training_mode
from toolkit.strategies.objective import Objective, refuse_learnt
from toolkit.strategies.priming import refuse_together
from toolkit.strategies.protocol import ModelFactory, OptimizerFactory
from toolkit.strategies.update import OptimizerWrapper


class ParameterServerRank:
    """The common part of servers and workers; see :class:`~toolkit.strategies.protocol.Strategy`."""

    evaluates_together = False

    _mail: PeerMessenger
    _inbox: PeerInbox
    _model: nn.Module  #: on a worker the whole model; on a server its part
    _part: nn.Module  #: this rank's part of the parameters; a worker's have no rows
    _update: OptimizerWrapper
    _cuts: dict[str, Cut]
    _by_parameter: dict[Tensor, Cut]

    def __init__(self, session: Session, config: ParameterServerConfig, train: TrainConfig) -> None:
        self._session = session
        self._train = train
        self._rank = session.rank
        self._servers = range(config.servers)
        self._workers = range(config.servers, session.world_size)
        self._others = range(1, session.world_size)  #: those that answer to rank 0
        self._count = len(self._workers)  #: of shares
        self._keeps_own = config.mode == "sync"  #: whether a worker's weights are the newest after each step
        self._device = session.device
        self._server = self._rank if self._rank in self._servers else None
        self._n = 0
        self._is_synchronized = True
        self.local_stopwatch = stopwatch(session.device)

    def build(
        self, model: ModelFactory, optimizer: OptimizerFactory, objective: Objective, sample: Batch | None
    ) -> None:
        """Raises ConfigError, on all ranks, for too few samples, an unused parameter, or slots that cannot be cut."""
        refuse_learnt(objective, "parameter_server")
        # Connections first, since making them is a collective. Messages are read only once all ranks agree.
        # Servers have one to every rank, workers to the servers.
        peers = {*self._servers} if self._server is None else {*self._servers, *self._workers}
        self._mail = PeerMessenger(sorted(peers - {self._rank}))
        self._inbox = PeerInbox(self._mail, self._handlers())
        whole = to_training_mode(model().to(self._device))
        refuse_extra_state(whole, "a parameter server")
        with torch.no_grad():
            broadcast_tensors([*whole.parameters(), *whole.buffers()], source=0)
        self._cuts = cut(whole, len(self._servers))
        self._part = server_partition(whole, self._cuts, self._server)
        self._by_parameter = {p: self._cuts[name] for name, p in self._part.named_parameters() if name in self._cuts}
        self._update = OptimizerWrapper(self._part, optimizer(self._part), self._train)
        refusal: str | None = None
        try:
            # Every server has the scalars, and updates in another order would make them differ.
            scalars = [name for name, p in self._part.named_parameters() if p.requires_grad and not p.ndim]
            if scalars and len(self._servers) > 1 and not self._keeps_own:
                raise ConfigError(
                    f"strategy.parameter_server.servers: {listing(scalars, 3)} has no dimension to cut; give it the "
                    "shape (1,), or use one server, or mode: sync"
                )
            self._try_optimizer()
            self._get_ready(whole, objective, sample)
        except ConfigError as error:
            refusal = str(error)
        # A rank that raised alone would leave the others waiting for its messages.
        refuse_together(refusal, group=self._mail.group)
        self._mail.open()

    def _get_ready(self, model: nn.Module, objective: Objective, sample: Batch | None) -> None:
        raise NotImplementedError

    def _handlers(self) -> dict[Kind, Handler]:
        """Return the handlers of messages that are handled as they come, by kind. A worker has none."""
        return {}

    def _try_optimizer(self) -> None:
        try:
            self._entries()
        except ConfigError:
            raise
        except Exception as error:  # any optimizer may fail in its own way on no rows
            raise ConfigError(
                "optim.name: this optimizer does not work on a part of the parameters "
                f"({type(error).__name__}: {error}); use another one, or ddp"
            ) from error

    def _exchanged(self, model: nn.Module, server: int) -> list[tuple[nn.Parameter, tuple[int, int] | None]]:
        """Return the parameters of ``model`` that concern ``server``, with its rows; None: all rows."""
        placed: list[tuple[nn.Parameter, tuple[int, int] | None]] = []
        for name, parameter in model.named_parameters():
            rows = self._cuts[name].rows(server) if name in self._cuts else None
            is_empty = rows is not None and rows[0] >= rows[1]
            if parameter.requires_grad and not is_empty:
                placed.append((parameter, rows))
        return placed

    def prepare_split_data(self) -> None:
        """Do nothing: statistics stay those of the first worker, since workers do not communicate."""

    def begin(self, step: int) -> None:
        """Keep the step, which is a ticket's number."""
        self._n = step

    def gather(self, value: Any) -> list[Any]:
        """Gather with one collective. Its callers have summed before, so no rank keeps the others waiting."""
        return gather_objects(value)

    def sum(self, values: Mapping[str, float | Tensor]) -> dict[str, float]:
        """Sum on rank 0, in rank order. Rank 0 tells all ranks the sums."""
        own = {name: float(value) for name, value in values.items()}
        if self._rank == 0:
            every = [own, *map(decode, self._inbox.gather(Kind.SUM, self._others))]
            names = dict.fromkeys(name for of_rank in every for name in of_rank)
            own = {name: sum(of_rank.get(name, 0.0) for of_rank in every) for name in names}
            self._mail.send_all(Kind.SUMMED, encode(own))
            return own
        self._mail.send(0, Kind.SUM, payload=encode(own))
        return dict(decode(self._inbox.wait_for(Kind.SUMMED)))

    def by_rank(self, values: Mapping[str, float | Tensor]) -> dict[str, Tensor]:
        """Gather by a sum in which each rank's values have names of their own."""
        found = self.sum({f"{self._rank}/{name}": value for name, value in values.items()})
        ranks = range(self._session.world_size)
        return {
            name: torch.tensor([found.get(f"{rank}/{name}", 0.0) for rank in ranks], dtype=torch.float64)
            for name in values
        }

    def synchronize(self) -> None:
        """Give all ranks the newest weights (in ``sync`` mode workers have them), and the first worker's buffers.

        When all ranks have come to here, every ticket is applied.
        """
        if self._is_synchronized:
            return
        buffers = [*self._part.buffers()]  # the same tensors as the whole model's
        place = Flat(buffers)
        if self._rank == 0:
            arrived = self._inbox.gather(Kind.SYNC, self._others)
            first = next(message for message in arrived if message.sender == self._workers[0])
            place.unpack(first.payload, buffers)
            self._mail.send_all(Kind.SYNCED, place.pack(buffers))
        else:
            self._mail.send(0, Kind.SYNC, payload=place.pack(buffers) if self._rank == self._workers[0] else None)
            place.unpack(self._inbox.wait_for(Kind.SYNCED).payload, buffers)
        if not self._keeps_own:
            self._refresh()
        self._is_synchronized = True

    def _refresh(self) -> None:
        """Send the newest weights to all workers."""
        raise NotImplementedError

    def step_metrics(self) -> Mapping[str, float | Tensor]:
        """Return nothing on a rank that applies no updates."""
        return {}

    def state(self) -> dict[str, Entry]:
        """Return the state. Every rank declares all of it, and a worker has no rows of it. A collective."""
        self.synchronize()
        entries = self._entries()
        # Small values that are equal on all servers (step counts) become rank 0's: workers do not make the steps.
        replicated = {name: entry.value for name, entry in entries.items() if isinstance(entry, Replicated)}
        small = {name: value for name, value in replicated.items() if not name.startswith("model/")}
        # Tensors are filled in place; plain values are replaced in ``entries``.
        tensors = [value for value in small.values() if isinstance(value, Tensor)]
        plain = {name: value for name, value in small.items() if not isinstance(value, Tensor)}
        place = Flat(tensors)
        if self._rank == 0:
            self._mail.send_all(Kind.TELL, place.pack(tensors))
            self._mail.send_all(Kind.TELL, encode(plain))
            return entries
        place.unpack(self._inbox.wait_for(Kind.TELL).payload, tensors)
        return entries | {name: Replicated(value) for name, value in decode(self._inbox.wait_for(Kind.TELL)).items()}

    def _entries(self) -> dict[str, Entry]:
        entries: dict[str, Entry] = {}
        for name, value in self._part.state_dict(keep_vars=True).items():
            entries[f"model/{name}"] = declared(name, value, self._by_parameter.get(value), self._server)
        for name, entry in self._update.state().items():
            entries[name] = declared(name, entry.value, self._cuts.get(name.split("/")[1]), self._server)
        return entries

    def on_loaded(self, values: Mapping[str, Json]) -> None:
        self._update.on_loaded(values)
        self._refresh()
        self._is_synchronized = True

    def close(self) -> None:
        """Leave the other ranks. They take a rank that fails for dead."""
        mail = self.__dict__.pop("_mail", None)
        if mail is not None:
            # Peers learn of an orderly end and of a stop only; they take this rank for dead after any other error.
            mail.close(orderly=isinstance(sys.exception(), (type(None), StoppedError)))
        for name in ("_inbox", "_model", "_part", "_update", "_by_parameter"):
            self.__dict__.pop(name, None)


#: The alignment of tensors in a message: torch wants a multiple of the element's size.
_ALIGN_BYTES = 16


@dataclass(frozen=True)
class Cut:
    """The cut of a parameter of ``shape``. Server j keeps its rows ``bounds[j]`` to ``bounds[j + 1]``."""

    shape: tuple[int, ...]
    bounds: tuple[int, ...]

    def rows(self, server: int | None) -> tuple[int, int]:
        """Return ``(start, stop)``; None stands for a rank that keeps no rows."""
        return (0, 0) if server is None else (self.bounds[server], self.bounds[server + 1])


def cut(model: nn.Module, servers: int) -> dict[str, Cut]:
    """Return a cut for each parameter that has one, by name. Every rank keeps scalars and frozen parameters whole.

    The others, one after the other, are cut into ``servers`` runs of whole rows, as equal in bytes as rows allow.
    """
    named = {
        name: parameter for name, parameter in model.named_parameters() if parameter.ndim and parameter.requires_grad
    }
    total = sum(parameter.nbytes for parameter in named.values())
    cuts, start = {}, 0
    for name, parameter in named.items():
        rows = parameter.shape[0]
        row_bytes = max(parameter.nbytes // max(rows, 1), 1)
        bounds = [0]
        for server in range(1, servers):
            # The row of this parameter that is nearest to the server's boundary in bytes; may lie outside of it.
            boundary = total * server // servers - start
            nearest = (boundary + row_bytes // 2) // row_bytes
            bounds.append(min(max(nearest, 0), rows))
        cuts[name] = Cut(tuple(parameter.shape), (*bounds, rows))
        start += parameter.nbytes
    return cuts


def server_partition(model: nn.Module, cuts: Mapping[str, Cut], server: int | None) -> nn.Module:
    """Return a copy of ``model`` whose parameters are the parts of ``server``. What is not cut is shared.

    An optimizer over it is the optimizer of that part: it knows all parameters by their names, also those of no rows.
    """
    # deepcopy takes the objects in ``memo`` for copied: buffers and uncut parameters are shared.
    memo: dict[int, object] = {id(buffer): buffer for buffer in model.buffers()}
    for name, parameter in model.named_parameters():
        memo[id(parameter)] = parameter
        if name in cuts:
            start, stop = cuts[name].rows(server)
            memo[id(parameter)] = nn.Parameter(parameter.detach()[start:stop].clone())
    return copy.deepcopy(model, memo)


def declared(name: str, value: Tensor | Json, cut: Cut | None, server: int | None) -> Entry:
    """Return the checkpoint's entry for ``server``'s part of a value cut like a parameter.

    Scalars and what is not cut are declared as equal on every rank. Raises ConfigError for a tensor of another shape.
    """
    if cut is None or not isinstance(value, Tensor) or not value.ndim:
        return Replicated(value.detach() if isinstance(value, Tensor) else value)
    start, stop = cut.rows(server)
    if tuple(value.shape) != (stop - start, *cut.shape[1:]):
        raise ConfigError(
            f"optim.name: {name} has another shape than its parameter, and so cannot be cut like it for the servers; "
            "use another optimizer, or ddp"
        )
    return Sharded(value.detach(), cut.shape, (start, *[0] * (len(cut.shape) - 1)))


class Flat:
    """The places of tensors like those of ``like`` in one message, (``nbytes``,) uint8 in host memory.

    Tensors on a GPU are packed there. The message is page-locked then, and one copy takes it across.
    """

    def __init__(self, like: Sequence[Tensor]) -> None:
        self._places: list[tuple[int, int, torch.dtype, torch.Size]] = []
        self.nbytes = 0
        for tensor in like:
            end = self.nbytes + tensor.nbytes
            self._places.append((self.nbytes, end, tensor.dtype, tensor.shape))
            self.nbytes = math.ceil(end / _ALIGN_BYTES) * _ALIGN_BYTES
        self._device = like[0].device if like else torch.device("cpu")

    def views(self, message: Tensor | None) -> list[Tensor]:
        """Return the tensors in ``message``, which is None if it has no bytes.

        On the CPU they are views of it. For tensors on a GPU the message is first copied there as a whole.
        """
        message = torch.empty(0, dtype=torch.uint8) if message is None else message
        return self._cut(message.to(self._device))

    def _cut(self, message: Tensor) -> list[Tensor]:
        views = []
        for start, stop, dtype, shape in self._places:
            values = message[start:stop].view(dtype)
            views.append(values.view(shape))
        return views

    @torch.no_grad()
    def unpack(self, message: Tensor | None, tensors: Sequence[Tensor]) -> None:
        """Fill ``tensors`` from ``message``."""
        if message is not None and tensors:
            torch._foreach_copy_(list(tensors), self.views(message))

    @torch.no_grad()
    def pack(self, tensors: Sequence[Tensor], message: Tensor | None = None) -> Tensor:
        """Return the tensors as a message. It takes the memory of an older ``message`` if that is given."""
        if message is None:
            message = torch.zeros(self.nbytes, dtype=torch.uint8, pin_memory=self._device.type != "cpu")
        if not tensors:
            return message
        there = message if message.device == self._device else torch.empty_like(message, device=self._device)
        torch._foreach_copy_(self._cut(there), list(tensors))
        if there is not message:
            message.copy_(there)  # waits: the message is sent from the host
        return message
