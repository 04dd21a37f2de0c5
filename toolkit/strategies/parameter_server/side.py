"""What servers and workers have in common: which ranks are there, the messages, the state."""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from toolkit.config import ParameterServerConfig, TrainConfig
from toolkit.errors import ConfigError, StoppedError, ToolkitError, listing
from toolkit.metrics.stopwatch import stopwatch
from toolkit.ranks.batch import Batch
from toolkit.ranks.collectives import broadcast_tensors
from toolkit.ranks.session import Session
from toolkit.ranks.state import Entry, Json, Replicated, Sharded
from toolkit.strategies.extra_state import refuse_extra_state
from toolkit.strategies.learnt import refuse_learnt
from toolkit.strategies.modes import in_training
from toolkit.strategies.objective import Objective
from toolkit.strategies.parameter_server import cuts
from toolkit.strategies.parameter_server.cuts import Cut, Flat
from toolkit.strategies.parameter_server.mail import Kind, Mail, PeerMessage, decode, encode
from toolkit.strategies.protocol import Again, ModelFactory, OptimizerFactory
from toolkit.strategies.update import Update


class Side:
    """The common part of servers and workers; see :class:`~toolkit.strategies.protocol.Strategy`."""

    round_steps = 1
    evaluates_together = False

    _mail: Mail
    _model: nn.Module  #: on a worker the whole model; on a server its part
    _part: nn.Module  #: this rank's part of the parameters; a worker's have no rows
    _update: Update
    _cuts: dict[str, Cut]
    _by_parameter: dict[Tensor, Cut]

    def __init__(self, session: Session, config: ParameterServerConfig, train: TrainConfig) -> None:
        self._session = session
        self._train = train
        self._rank = session.rank
        self._servers = range(config.servers)
        self._workers = range(config.servers, session.world_size)
        self._count = len(self._workers)  #: of shares; all are computed, even after deaths
        self._keeps_own = config.mode == "sync"  #: whether a worker's weights are the newest after each step
        self._device = session.device
        self._server = self._rank if self._rank in self._servers else None
        #: Ranks that have died, by the messages handled so far: what a dead worker had sent before still counts.
        self._gone: set[int] = set()
        self._waiting: defaultdict[Kind, deque[PeerMessage]] = defaultdict(deque)
        self._again: Again | None = None
        self._n = 0
        self._settled = True
        self.lost: frozenset[int] = frozenset()
        self.own_time = stopwatch(session.device)

    @property
    def expendable(self) -> frozenset[int]:
        """Return the workers."""
        return frozenset(self._workers)

    # ------------------------------------------------------------------------------------------------------ building

    def build(
        self, model: ModelFactory, optimizer: OptimizerFactory, objective: Objective, sample: Batch | None
    ) -> None:
        """Build this rank's side.

        Raises ConfigError, on all ranks, if a worker would have no sample or a parameter no gradient, or if the
        optimizer keeps something that cannot be cut like a parameter.
        """
        refuse_learnt(objective, "parameter_server")
        # Connections first, since making them is a collective. Messages are read only once all ranks agree.
        peers = [rank for rank in range(self._session.world_size) if self._talks_to(rank)]
        self._mail = Mail(peers, self._noticed)
        made = in_training(model().to(self._device))
        refuse_extra_state(made, "a parameter server")
        with torch.no_grad():
            broadcast_tensors([*made.parameters(), *made.buffers()], source=0)
        self._cuts = cuts.cut(made, len(self._servers))
        self._part = cuts.shadow(made, self._cuts, self._server)
        self._by_parameter = {p: self._cuts[name] for name, p in self._part.named_parameters() if name in self._cuts}
        self._update = Update(self._part, optimizer(self._part), self._train)
        # Checks raise on single ranks; _agree() raises the first refusal on all of them.
        checks = self._refuse, self._try_optimizer, lambda: self._get_ready(made, objective, sample)
        self._agree([self._refusal(check) for check in checks])
        self._mail.open()

    def _talks_to(self, rank: int) -> bool:
        """True if this rank has a connection to ``rank``. Servers have one to every rank, workers to the servers."""
        return rank != self._rank and (self._server is not None or rank in self._servers)

    def _get_ready(self, model: nn.Module, objective: Objective, sample: Batch | None) -> None:
        raise AssertionError("each side does it in its own way")

    def _refuse(self) -> None:
        """Refuse scalars if several servers update asynchronously.

        Every server has them, and updates in another order would make them differ.
        """
        scalars = [name for name, p in self._part.named_parameters() if p.requires_grad and not p.ndim]
        if scalars and len(self._servers) > 1 and not self._keeps_own:
            raise ConfigError(
                f"strategy.parameter_server.servers: {listing(scalars, 3)} has no dimension to cut; give it the shape "
                "(1,), or use one server, or mode: sync"
            )

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

    @staticmethod
    def _refusal(check: Callable[[], Any]) -> str | None:
        try:
            check()
        except ConfigError as error:
            return str(error)
        return None

    def _agree(self, refusals: Sequence[str | None]) -> None:
        """Raise on all ranks what was refused on any: the others would wait for that rank's messages."""
        found: list[Any] = [None] * self._session.world_size
        dist.all_gather_object(found, list(refusals), group=self._mail.group)
        said = [text for texts in found for text in texts if text is not None]
        if said:
            raise ConfigError(said[0])

    def _exchanged(self, model: nn.Module, server: int) -> list[tuple[nn.Parameter, tuple[int, int] | None]]:
        """Return the parameters of ``model`` that concern ``server``, with its rows; None: all rows."""
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        placed = [(p, self._cuts[name].rows(server) if name in self._cuts else None) for name, p in trained]
        return [(p, rows) for p, rows in placed if rows is None or rows[0] < rows[1]]

    def split_data(self) -> None:
        """Do nothing: statistics stay those of the first living worker, since workers do not communicate."""

    def begin(self, step: int, again: Again) -> None:
        """Keep the step: it is the ticket's number, by which another worker can ask for its samples."""
        self._n, self._again = step, again

    # ------------------------------------------------------------------------------------------------------ messages

    def _noticed(self, rank: int) -> None:
        """End a save's wait for a dead worker. Called at once, in any thread."""
        if self._rank == 0 and rank in self._workers:
            self._session.lose(rank)

    def _take(self, message: PeerMessage) -> None:
        """Do what a message asks for, or keep it until it is awaited."""
        if message.kind is Kind.LOST:
            self._note_death(message.sender)
        else:
            self._waiting[message.kind].append(message)

    def _note_death(self, rank: int) -> None:
        """Note that ``rank`` has died. Raises ToolkitError if the training cannot go on without it."""
        self._gone.add(rank)
        if rank in self._servers:
            raise ToolkitError(f"rank {rank}, a parameter server, is gone; see its log")
        if not self._living:
            raise ToolkitError(f"all {self._count} workers have died; see the logs of ranks {self._workers[0]} and up")

    @property
    def _living(self) -> list[int]:
        """Return the living workers, as this rank knows at this moment. Others may know more, or less."""
        return [rank for rank in self._workers if rank not in self._gone]

    def _await(self, kind: Kind) -> PeerMessage:
        """Return the next message of ``kind``; all others are handled meanwhile."""
        while not self._waiting[kind]:
            self._take(self._mail.receive())
        return self._waiting[kind].popleft()

    def _gather(self, kind: Kind) -> list[PeerMessage]:
        """Return a message of ``kind`` from every other living rank, in rank order. Rank 0 calls it."""
        found: dict[int, PeerMessage] = {}
        others = range(1, self._session.world_size)
        while True:
            while self._waiting[kind]:
                message = self._waiting[kind].popleft()
                found[message.sender] = message
            # A rank that dies meanwhile is not waited for.
            if all(rank in found or rank in self._gone for rank in others):
                return [found[rank] for rank in sorted(found)]
            self._take(self._mail.receive())

    def _tell(self, kind: Kind, payload: Tensor) -> None:
        for rank in range(1, self._session.world_size):
            self._mail.send(rank, kind, payload=payload)

    def gather(self, value: Any) -> list[Any]:
        raise ConfigError(
            "strategy.name: under parameter_server an evaluation gathers no rows (toolkit.Rows), for workers may die; "
            "use ddp or fsdp, or figures that are averaged"
        )

    def sum(self, values: Mapping[str, float | Tensor]) -> dict[str, float]:
        """Sum on rank 0, in rank order. Rank 0 tells all ranks the sums, and which ranks have died."""
        own = {name: float(value) for name, value in values.items()}
        if self._rank == 0:
            told = [own, *map(decode, self._gather(Kind.SUM))]
            names = dict.fromkeys(name for each in told for name in each)
            own = {name: sum(each.get(name, 0.0) for each in told) for name in names}
            self.lost = frozenset(self._gone)
            self._tell(Kind.SUMMED, encode([own, sorted(self.lost)]))
            return own
        self._mail.send(0, Kind.SUM, payload=encode(own))
        total, lost = decode(self._await(Kind.SUMMED))
        self.lost = frozenset(lost)
        return dict(total)

    def by_rank(self, values: Mapping[str, float | Tensor]) -> dict[str, Tensor]:
        """Gather by a sum in which each rank's values have names of their own."""
        found = self.sum({f"{self._rank}/{name}": value for name, value in values.items()})
        ranks = range(self._session.world_size)
        return {
            name: torch.tensor([found.get(f"{rank}/{name}", 0.0) for rank in ranks], dtype=torch.float64)
            for name in values
        }

    def settle(self) -> None:
        """Give all ranks the newest weights, and the buffers of the first living worker.

        When all ranks have come to here, every ticket is applied. In ``sync`` mode workers have the newest weights
        already.
        """
        if self._settled:
            return
        buffers = [*self._part.buffers()]  # the same tensors as the whole model's
        place = Flat(buffers)
        # Rank 0 waits for all ranks, asks a worker for its buffers and sends them to all.
        if self._rank == 0:
            self._gather(Kind.SETTLE)
            self._copy(place, buffers, self._first_buffers() if buffers else None)
            self.lost = frozenset(self._gone)
            self._tell(Kind.SETTLED, encode(sorted(self.lost)))
            self._tell(Kind.TELL, place.pack(buffers))
        else:
            self._mail.send(0, Kind.SETTLE)
            self.lost = frozenset(decode(self._await(Kind.SETTLED)))
            self._copy(place, buffers, self._await(Kind.TELL).payload)
        if not self._keeps_own:
            self._refresh()
        self._settled = True

    def _first_buffers(self) -> Tensor | None:
        """Return the buffers of the first living worker.

        Rank 0 asks one worker after the other, should one die over it.
        """
        while True:
            asked = self._living[0]
            self._mail.send(asked, Kind.ASK)
            while asked not in self._gone and not self._waiting[Kind.BUFFERS]:
                self._take(self._mail.receive())
            if self._waiting[Kind.BUFFERS]:
                return self._waiting[Kind.BUFFERS].popleft().payload

    @staticmethod
    @torch.no_grad()
    def _copy(place: Flat, tensors: Sequence[Tensor], message: Tensor | None) -> None:
        for tensor, value in zip(tensors, place.views(message) if tensors else [], strict=True):
            tensor.copy_(value)

    def _refresh(self) -> None:
        """Send the newest weights to all workers."""
        raise AssertionError("each side does it in its own way")

    def figures(self) -> Mapping[str, float | Tensor]:
        """Return nothing on a rank that applies no updates."""
        return {}

    # --------------------------------------------------------------------------------------------------------- state

    def state(self) -> dict[str, Entry]:
        """Return the state, which every rank declares in full, a worker with no rows of it. A collective."""
        self.settle()
        entries = self._entries()
        self._equalise(entries)
        return entries

    def _entries(self) -> dict[str, Entry]:
        weights = self._part.state_dict(keep_vars=True)
        found = {
            f"model/{name}": self._entry(name, value, self._by_parameter.get(value)) for name, value in weights.items()
        }
        for name, entry in self._update.state().items():
            found[name] = self._entry(name, entry.value, self._cuts.get(name.split("/")[1]))
        return found

    def _entry(self, name: str, value: Tensor | Json, cut: Cut | None) -> Entry:
        # Scalars and what is not cut are declared as equal on every rank.
        if cut is None or not isinstance(value, Tensor) or not value.ndim:
            return Replicated(value.detach() if isinstance(value, Tensor) else value)
        if tuple(value.shape) != cut.part_shape(self._server):
            raise ConfigError(
                f"optim.name: {name} has another shape than its parameter, and so cannot be cut like it for the "
                "servers; use another optimizer, or ddp"
            )
        return Sharded(value.detach(), cut.shape, cut.offsets(self._server))

    def _equalise(self, entries: dict[str, Entry]) -> None:
        """Set small values that are equal on all servers (step counts) to rank 0's.

        Workers do not make the steps.
        """
        small = {name: entry.value for name, entry in entries.items() if self._is_small(name, entry)}
        # Tensors are filled in place; plain values are replaced in ``entries``.
        tensors = [value for value in small.values() if isinstance(value, Tensor)]
        plain = {name: value for name, value in small.items() if not isinstance(value, Tensor)}
        place = Flat(tensors)
        if self._rank == 0:
            self._tell(Kind.TELL, place.pack(tensors))
            self._tell(Kind.TELL, encode(plain))
            return
        self._copy(place, tensors, self._await(Kind.TELL).payload)
        entries |= {name: Replicated(value) for name, value in decode(self._await(Kind.TELL)).items()}

    @staticmethod
    def _is_small(name: str, entry: Entry) -> bool:
        return isinstance(entry, Replicated) and not name.startswith("model/")

    def live(self) -> dict[str, Tensor]:
        """Return weights and buffers on a worker; on a server parts of weights and their optimizer state."""
        weights = {f"weights/{name}": value.detach() for name, value in self._model.named_parameters()}
        return weights | {f"buffers/{name}": value for name, value in self._model.named_buffers()}

    def loaded(self, values: Mapping[str, Json]) -> None:
        self._update.loaded(values)
        self._refresh()
        self._settled = True

    def close(self) -> None:
        """Leave the other ranks. They take a rank that fails for dead."""
        mail = self.__dict__.pop("_mail", None)
        if mail is not None:
            # Peers are told of an orderly end and of a stop only; they take this rank for dead after any other error.
            mail.close(orderly=isinstance(sys.exception(), (type(None), StoppedError)))
        for name in ("_model", "_part", "_update", "_by_parameter", "_again"):
            self.__dict__.pop(name, None)
