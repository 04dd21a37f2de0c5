"""What servers and workers have in common: who is there, the messages, the state."""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from toolkit.config import ParameterServerConfig, TrainConfig
from toolkit.dist.batch import Batch
from toolkit.dist.collectives import broadcast_tensors
from toolkit.dist.session import Session
from toolkit.dist.state import Entry, Json, Replicated, Sharded
from toolkit.errors import ConfigError, StoppedError, ToolkitError, listing
from toolkit.metrics.stopwatch import stopwatch
from toolkit.strategies.extra_state import refuse_extra_state
from toolkit.strategies.learnt import refuse_learnt
from toolkit.strategies.modes import in_training
from toolkit.strategies.objective import Objective
from toolkit.strategies.parameter_server import cuts
from toolkit.strategies.parameter_server.cuts import Cut, Flat
from toolkit.strategies.parameter_server.mail import Kind, Mail, Message, decode, encode
from toolkit.strategies.protocol import Again, ModelFactory, OptimizerFactory
from toolkit.strategies.update import Update


class Side:
    """See :class:`~toolkit.strategies.protocol.Strategy`; the rest of it servers and workers do each in their way."""

    round_steps = 1
    evaluates_together = False

    _mail: Mail
    _model: nn.Module  #: on a worker the whole one; on a server its part
    _part: nn.Module  #: this rank's part of the parameters: a worker's have no rows
    _update: Update
    _cuts: dict[str, Cut]
    _by_parameter: dict[Tensor, Cut]

    def __init__(self, session: Session, config: ParameterServerConfig, train: TrainConfig) -> None:
        self._session = session
        self._train = train
        self._rank = session.rank
        self._servers = range(config.servers)
        self._workers = range(config.servers, session.world_size)
        self._count = len(self._workers)  #: of shares: all of them are computed, whoever lives
        self._keeps_own = config.mode == "sync"  #: whether a worker's weights are the newest after each step
        self._device = session.device
        self._server = self._rank if self._rank in self._servers else None
        #: Who has died, as far as the messages before it are dealt with: what a dead worker had sent still counts.
        self._gone: set[int] = set()
        self._waiting: defaultdict[Kind, deque[Message]] = defaultdict(deque)
        self._again: Again | None = None
        self._n = 0
        self._settled = True
        self.lost: frozenset[int] = frozenset()
        self.own_time = stopwatch(session.device)

    @property
    def expendable(self) -> frozenset[int]:
        """The workers."""
        return frozenset(self._workers)

    # ------------------------------------------------------------------------------------------------------ building

    def build(
        self, model: ModelFactory, optimizer: OptimizerFactory, objective: Objective, sample: Batch | None
    ) -> None:
        """Raises ConfigError, on all ranks, when a worker would have no sample or a parameter no gradient, and when the
        optimizer keeps something that cannot be cut like a parameter."""
        refuse_learnt(objective, "parameter_server")
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
        checks = self._refuse, self._try_optimizer, lambda: self._get_ready(made, objective, sample)
        self._agree([self._refusal(check) for check in checks])
        self._mail.open()

    def _talks_to(self, rank: int) -> bool:
        """Servers have a connection to everybody, workers to the servers."""
        return rank != self._rank and (self._server is not None or rank in self._servers)

    def _get_ready(self, model: nn.Module, objective: Objective, sample: Batch | None) -> None:
        raise AssertionError("each side does it in its own way")

    def _refuse(self) -> None:
        """Every server has the scalars; asynchronous updates in another order would make them drift apart."""
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
        except Exception as error:  # whatever an optimizer makes of a parameter of no rows
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
        """Raise what was refused on any rank on all of them: the others would wait for that rank's messages."""
        found: list[Any] = [None] * self._session.world_size
        dist.all_gather_object(found, list(refusals), group=self._mail.group)
        said = [text for texts in found for text in texts if text is not None]
        if said:
            raise ConfigError(said[0])

    def _exchanged(self, model: nn.Module, server: int) -> list[tuple[nn.Parameter, tuple[int, int] | None]]:
        """Of the parameters of ``model`` those that concern ``server``, with its rows; None: the whole of it."""
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        placed = [(p, self._cuts[name].rows(server) if name in self._cuts else None) for name, p in trained]
        return [(p, rows) for p, rows in placed if rows is None or rows[0] < rows[1]]

    def split_data(self) -> None:
        """Statistics stay those of the first worker that lives: workers do not hear of each other."""

    def begin(self, step: int, again: Again) -> None:
        """The step is the ticket's number, by which another worker can ask for its samples."""
        self._n, self._again = step, again

    # ------------------------------------------------------------------------------------------------------ messages

    def _noticed(self, rank: int) -> None:
        """In any thread, at once: a save that waits for a dead rank need wait no longer."""
        if self._rank == 0 and rank in self._workers:
            self._session.lose(rank)

    def _take(self, message: Message) -> None:
        """Do what a message asks for, or keep it for whoever awaits it."""
        if message.kind is Kind.LOST:
            self._mourn(message.sender)
        else:
            self._waiting[message.kind].append(message)

    def _mourn(self, rank: int) -> None:
        """Raises ToolkitError for one without whom nothing goes on."""
        self._gone.add(rank)
        if rank in self._servers:
            raise ToolkitError(f"rank {rank}, a parameter server, is gone; see its log")
        if not self._living:
            raise ToolkitError(f"all {self._count} workers have died; see the logs of ranks {self._workers[0]} and up")

    @property
    def _living(self) -> list[int]:
        """The workers that live, as this rank knows at this moment; others may know more, or less."""
        return [rank for rank in self._workers if rank not in self._gone]

    def _await(self, kind: Kind) -> Message:
        """The next message of ``kind``; all others are dealt with meanwhile."""
        while not self._waiting[kind]:
            self._take(self._mail.receive())
        return self._waiting[kind].popleft()

    def _gather(self, kind: Kind) -> list[Message]:
        """Rank 0: a message of ``kind`` from every other rank that lives, in the order of the ranks."""
        found: dict[int, Message] = {}
        others = range(1, self._session.world_size)
        while True:
            while self._waiting[kind]:
                message = self._waiting[kind].popleft()
                found[message.sender] = message
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
        """Over rank 0, which adds what came in the order of the ranks, and says who has died."""
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
        """A sum in which each rank's values have names of their own."""
        found = self.sum({f"{self._rank}/{name}": value for name, value in values.items()})
        ranks = range(self._session.world_size)
        return {
            name: torch.tensor([found.get(f"{rank}/{name}", 0.0) for rank in ranks], dtype=torch.float64)
            for name in values
        }

    def settle(self) -> None:
        """All have come to here, so every ticket is applied: the newest weights, and the buffers of the first worker
        that lives, go to all."""
        if self._settled:
            return
        buffers = [*self._part.buffers()]  # the same tensors as the whole model's
        place = Flat(buffers)
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
        """Rank 0: asks one worker after the other, should they die over it."""
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
        """The newest weights to all workers."""
        raise AssertionError("each side does it in its own way")

    def figures(self) -> Mapping[str, float | Tensor]:
        """None on a rank that applies no updates."""
        return {}

    # --------------------------------------------------------------------------------------------------------- state

    def state(self) -> dict[str, Entry]:
        """Every rank declares everything, a worker with no rows of it. A collective."""
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
        if cut is None or not isinstance(value, Tensor) or not value.ndim:
            return Replicated(value.detach() if isinstance(value, Tensor) else value)
        if tuple(value.shape) != cut.part_shape(self._server):
            raise ConfigError(
                f"optim.name: {name} has another shape than its parameter, and so cannot be cut like it for the "
                "servers; use another optimizer, or ddp"
            )
        return Sharded(value.detach(), cut.shape, cut.offsets(self._server))

    def _equalise(self, entries: dict[str, Entry]) -> None:
        """What is small and equal on all servers (step counts), rank 0's for all: workers do not make the steps."""
        small = {name: entry.value for name, entry in entries.items() if self._is_small(name, entry)}
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
        """A worker has weights and buffers, a server parts of weights and the optimizer's state of them."""
        weights = {f"weights/{name}": value.detach() for name, value in self._model.named_parameters()}
        return weights | {f"buffers/{name}": value for name, value in self._model.named_buffers()}

    def loaded(self, values: Mapping[str, Json]) -> None:
        self._update.loaded(values)
        self._refresh()
        self._settled = True

    def close(self) -> None:
        """Leave the others, who take a rank that fails for dead."""
        mail = self.__dict__.pop("_mail", None)
        if mail is not None:
            mail.close(orderly=isinstance(sys.exception(), (type(None), StoppedError)))
        for name in ("_model", "_part", "_update", "_by_parameter", "_again"):
            self.__dict__.pop(name, None)
