"""parameter_server: the first ranks keep the weights and apply the updates, the others compute gradients.

After Li et al., "Scaling Distributed Machine Learning with the Parameter Server" (OSDI 2014). A *ticket* is a share of
one step's global batch. A worker computes its ticket, pushes the gradient to the servers, each of which takes what
concerns its own part of the parameters, and waits for new weights. When these come is the only difference of the modes:

* ``sync``: when all tickets of the step have come and were applied together, added up in the order of the shares: the
  steps of ddp, to rounding. Nothing depends on who was faster, so a resume is the same bit for bit.
* ``async``: at once; each ticket is an update of its own (Hogwild's and DistBelief's way).
* ``bounded``: so, too, but a worker that is ``staleness`` tickets ahead of the slowest waits for it (Stale Synchronous
  Parallel, Ho et al., NIPS 2013).

Length of the steps. In ``async`` and ``bounded`` the gradient of a ticket is the mean over its own samples, and is
applied with the learning rate times its share of the global batch. So a pass over the data moves the weights as far as
in ``sync``, also with optimizers such as Adam that make every gradient equally long.

Deaths. Only pairs of ranks talk while training (see mail.py), so a worker's death disturbs nobody. Which samples a
ticket holds follows from the step and the share, so any other worker can compute it, and does: in ``sync`` the result
has the same bits as if nobody had died. Rank 0, a server, writes the checkpoints; a server's death ends the attempt.
"""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import astuple, dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from toolkit import logs
from toolkit.activity import PRIMING
from toolkit.config import ParameterServerConfig, StrategyConfig, TrainConfig
from toolkit.dist.batch import Batch, Share
from toolkit.dist.collectives import broadcast_tensors
from toolkit.dist.session import Session
from toolkit.dist.state import Entry, Json, Replicated, Sharded
from toolkit.errors import ConfigError, StoppedError, ToolkitError, listing
from toolkit.metrics.stopwatch import stopwatch
from toolkit.strategies import cuts
from toolkit.strategies.blocks import checkpoint_activations
from toolkit.strategies.cuts import Cut, Flat
from toolkit.strategies.mail import Kind, Mail, Message, decode, encode
from toolkit.strategies.protocol import Again, Criterion, Measure, ModelFactory, OptimizerFactory, StepOutput, Sums
from toolkit.strategies.spmd import compile_errors
from toolkit.strategies.update import Update

log = logs.get(__name__)


def build(config: StrategyConfig, session: Session, train: TrainConfig) -> Server | Worker:
    """This rank's side of it. Raises ConfigError when there would be no worker."""
    chosen = config.parameter_server
    if chosen.servers >= session.world_size:
        raise ConfigError(
            f"strategy.parameter_server.servers: {chosen.servers} of {session.world_size} ranks leave no worker; use "
            "fewer, or more ranks"
        )
    if session.rank >= chosen.servers:
        return Worker(session, chosen, train, recompute=config.activation_checkpointing)
    if chosen.mode == "sync":
        return SyncServer(session, chosen, train)
    return AsyncServer(session, chosen, train, ahead=chosen.staleness if chosen.mode == "bounded" else None)


class _Side:
    """What servers and workers have in common: who is there, the messages, the state."""

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
        self, model: ModelFactory, optimizer: OptimizerFactory, criterion: Criterion, sample: Batch | None
    ) -> None:
        """Raises ConfigError, on all ranks, when a worker would have no sample or a parameter no gradient, and when the
        optimizer keeps something that cannot be cut like a parameter."""
        peers = [rank for rank in range(self._session.world_size) if self._talks_to(rank)]
        self._mail = Mail(peers, self._noticed)
        made = model().to(self._device).train()
        with torch.no_grad():
            broadcast_tensors([*made.parameters(), *made.buffers()], source=0)
        self._cuts = cuts.cut(made, len(self._servers))
        self._part = cuts.shadow(made, self._cuts, self._server)
        self._by_parameter = {p: self._cuts[name] for name, p in self._part.named_parameters() if name in self._cuts}
        self._update = Update(self._part, optimizer(self._part), self._train)
        checks = self._refuse, self._try_optimizer, lambda: self._get_ready(made, criterion, sample)
        self._agree([self._refusal(check) for check in checks])
        self._mail.open()

    def _talks_to(self, rank: int) -> bool:
        """Servers have a connection to everybody, workers to the servers."""
        return rank != self._rank and (self._server is not None or rank in self._servers)

    def _get_ready(self, model: nn.Module, criterion: Criterion, sample: Batch | None) -> None:
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


# ------------------------------------------------------------------------------------------------------------- servers


@dataclass(frozen=True)
class _Push:
    """What a worker says of a ticket beside its gradient, which is that of ``loss``."""

    step: int
    share: int
    version: int  #: of the weights that it was computed with
    loss: float  #: the sum over its samples, divided by ``assumed``
    weight: float  #: what that sum weighs; without weights, the number of samples
    samples: int
    assumed: int  #: samples of the global batch

    @property
    def part(self) -> float:
        """Of the global batch."""
        return self.samples / self.assumed

    def numbers(self) -> tuple[float, ...]:
        return astuple(self)

    @staticmethod
    def of(message: Message) -> _Push:
        step, share, version, loss, weight, samples, assumed = message.numbers
        return _Push(int(step), int(share), int(version), loss, weight, int(samples), int(assumed))


class Server(_Side):
    """Keeps a part of the parameters and of the optimizer's state."""

    share = Share(0, 0)

    def __init__(self, session: Session, config: ParameterServerConfig, train: TrainConfig) -> None:
        super().__init__(session, config, train)
        self._serving = False  #: in a step; who dies between two is missed when the next one begins
        self._asked: dict[int, int] = {}  #: the worker that computes a share in place of a dead one

    def _get_ready(self, model: nn.Module, criterion: Criterion, sample: Batch | None) -> None:
        assert self._server is not None
        self._model = self._part
        self._parameters = [p for p, _ in self._exchanged(self._part, self._server)]
        self._place = Flat(self._parameters)
        self._packed: Tensor | None = None
        self._is_packed = False  #: whether that is the newest weights
        self._version = 0  #: updates done

    def step(self, batch: Batch | None, lr: float) -> StepOutput:
        """Returns when a ticket of each share has come for this step; rank 0's loss is that of all."""
        self._settled, self._serving = False, True
        self._asked.clear()
        self._reissue()
        loss = self._serve(lr)
        self._serving = False
        self._n += 1
        return StepOutput(torch.tensor(loss if self._rank == 0 else 0.0, dtype=torch.float64, device=self._device))

    def _serve(self, lr: float) -> float:
        raise AssertionError("each mode does it in its own way")

    def _is_missing(self, share: int) -> bool:
        """Whether the ticket of ``share`` in this step has not come."""
        raise AssertionError("each mode knows in its own way")

    def _mourn(self, rank: int) -> None:
        super()._mourn(rank)
        if self._serving:
            self._reissue()

    def _reissue(self) -> None:
        """Have the tickets of this step that dead workers owe computed by others: in turn, and by the same for all
        servers unless they have heard of different deaths, so that it is computed once."""
        living = self._living
        for share in range(self._count):
            holder = self._asked.get(share, self._workers[share])
            if holder in self._gone and self._is_missing(share):
                self._asked[share] = living[(self._n + share) % len(living)]
                self._mail.send(self._asked[share], Kind.REISSUE, (self._n, share))

    def _apply(self, gradients: Sequence[Tensor], lr: float) -> None:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient.to(self._device)
        for parameter in self._part.parameters():  # of no rows here; the optimizer counts their steps all the same
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._update.apply(lr)
        self._version += 1
        self._is_packed = False

    def _send_weights(self, worker: int) -> None:
        if not self._is_packed:
            self._packed = self._place.pack([p.detach() for p in self._parameters], self._packed)
            self._is_packed = True
        self._mail.send(worker, Kind.WEIGHTS, (self._version,), self._packed)

    def _refresh(self) -> None:
        self._is_packed = False  # a checkpoint may have been read into them
        for worker in self._living:
            self._send_weights(worker)

    def evaluate(self, batch: Batch | None, measure: Measure) -> Sums:
        """Nothing is evaluated here."""
        return Sums({}, 0)

    def figures(self) -> Mapping[str, float | Tensor]:
        return self._update.figures()

    def live(self) -> dict[str, Tensor]:
        return super().live() | self._update.live()


class SyncServer(Server):
    """One update a step, of all shares."""

    def __init__(self, session: Session, config: ParameterServerConfig, train: TrainConfig) -> None:
        super().__init__(session, config, train)
        self._arrived: dict[int, Message] = {}
        self._folded = 0  #: so many shares of this step are in the sum

    def _take(self, message: Message) -> None:
        if message.kind is Kind.PUSH:
            pushed = _Push.of(message)
            assert pushed.step == self._n, "a ticket comes in its step"
            assert self._is_missing(pushed.share), "and once"
            self._arrived[pushed.share] = message
        else:
            super()._take(message)

    def _is_missing(self, share: int) -> bool:
        return share >= self._folded and share not in self._arrived

    def _serve(self, lr: float) -> float:
        """In the order of the shares, whichever comes first: else the sum would have other last bits each time."""
        gradients: list[Tensor] = []
        loss = weight = 0.0
        for share in range(self._count):
            while share not in self._arrived:
                self._take(self._mail.receive())
            message = self._arrived.pop(share)
            self._folded = share + 1
            pushed, part = _Push.of(message), self._place.views(message.payload)
            if gradients:
                torch._foreach_add_(gradients, part)
            gradients = gradients or part
            loss, weight = loss + pushed.loss, weight + pushed.weight
        factor = _scale(gradients, pushed.assumed / max(weight, 1e-30))
        self._apply(gradients, lr)
        self._folded = 0
        self._refresh()
        return loss * factor


def _scale(gradients: list[Tensor], factor: float) -> float:
    """In place, and nothing where it changes nothing."""
    if gradients and factor != 1.0:
        torch._foreach_mul_(gradients, factor)
    return factor


class AsyncServer(Server):
    """An update for each ticket."""

    def __init__(
        self, session: Session, config: ParameterServerConfig, train: TrainConfig, *, ahead: int | None
    ) -> None:
        super().__init__(session, config, train)
        self._ahead = ahead
        self._done = [0] * self._count  #: tickets of each share
        self._held: set[int] = set()  #: shares whose workers wait for weights
        self._lr = 0.0
        self._loss = 0.0
        self._stale: list[int] = []

    def begin(self, step: int, again: Again) -> None:
        super().begin(step, again)
        self._done = [step] * self._count

    def _take(self, message: Message) -> None:
        if message.kind is Kind.PUSH:
            self._push(message)
        else:
            super()._take(message)

    def _is_missing(self, share: int) -> bool:
        return self._done[share] <= self._n

    def _serve(self, lr: float) -> float:
        """Tickets of later steps, by faster workers, are applied as well, with this step's rate."""
        self._lr = lr
        while min(self._done) <= self._n:
            self._take(self._mail.receive())
        loss, self._loss = self._loss, 0.0
        return loss

    def _push(self, message: Message) -> None:
        pushed, gradients = _Push.of(message), self._place.views(message.payload)
        factor = _scale(gradients, pushed.assumed / max(pushed.weight, 1e-30))
        self._stale.append(self._version - pushed.version)
        self._apply(gradients, self._lr * pushed.part)
        self._loss += pushed.loss * factor * pushed.part
        assert pushed.step == self._done[pushed.share], "each ticket comes once, and in order"
        self._done[pushed.share] += 1
        if message.sender == self._workers[pushed.share]:
            self._held.add(pushed.share)
        self._release()

    def _release(self) -> None:
        """Give new weights to those who are not too far ahead."""
        slowest = min(self._done)
        for share in sorted(self._held):
            if self._ahead is None or self._done[share] - slowest <= self._ahead:
                self._held.discard(share)
                self._send_weights(self._workers[share])

    def figures(self) -> Mapping[str, float | Tensor]:
        """How many updates lay between the weights that a ticket was computed with and those that it changed."""
        if not self._stale:
            return super().figures()
        stale, self._stale = torch.tensor(self._stale), []
        return {
            **super().figures(),
            "staleness/mean": stale.double().mean().item(),
            "staleness/max": float(stale.max()),
            "staleness/tickets": stale,
        }


# ------------------------------------------------------------------------------------------------------------- workers


#: Loss, weight, samples, samples of the global batch: see _Push.
_Told: TypeAlias = tuple[float, float, int, int]


class Worker(_Side):
    """Has the whole model, of which the servers have the newest weights, and computes gradients."""

    def __init__(self, session: Session, config: ParameterServerConfig, train: TrainConfig, *, recompute: bool) -> None:
        super().__init__(session, config, train)
        self._mine = self._rank - config.servers  #: the share of training
        self._recompute = recompute
        self._versions = dict.fromkeys(self._servers, 0)
        self._again_done: dict[int, tuple[int, dict[int, Tensor], _Told]] = {}  #: by share

    @property
    def share(self) -> Share:
        """Of the living: where the training began with a loader of another one, that one stays its own."""
        living = [rank for rank in self._workers if rank not in self.lost]
        return Share(living.index(self._rank), len(living))

    def _get_ready(self, model: nn.Module, criterion: Criterion, sample: Batch | None) -> None:
        if sample is None or sample.global_count < self._count:
            size = "fewer samples than workers" if sample is None else f"{sample.global_count} samples"
            raise ConfigError(
                f"data.global_batch_size: {size} cannot be shared by {self._count} workers: some would have none; "
                f"use {self._count} or more"
            )
        self._model, self._criterion = model, criterion
        if self._recompute:
            checkpoint_activations(model)
        if self._train.compile:
            model.compile()
        self._placed = {server: self._exchanged(model, server) for server in self._servers}
        self._places = {server: Flat([_rows(p, rows) for p, rows in placed]) for server, placed in self._placed.items()}
        self._outbox: dict[int, Tensor | None] = dict.fromkeys(self._servers)
        with compile_errors(self._train.compile):
            self._prime(sample)

    def _prime(self, sample: Batch) -> None:
        """One pass that leaves nothing behind: it compiles, and tells which parameters are not used."""
        self._session.activity.phase = PRIMING
        devices = [self._device] if self._device.type != "cpu" else []
        with torch.random.fork_rng(devices, device_type=self._device.type if devices else "cuda"), self._buffers_kept():
            self._pass(sample)
        named = self._model.named_parameters()
        unused = [name for name, parameter in named if parameter.requires_grad and parameter.grad is None]
        self._model.zero_grad()
        if unused:
            raise ConfigError(
                f"model: the loss does not depend on {listing(unused, 5)}; freeze such parameters "
                "(requires_grad_(False)) or use them in forward()"
            )

    @contextmanager
    def _buffers_kept(self) -> Iterator[None]:
        """What a pass that is not ours counts in BatchNorm's statistics is undone."""
        before = [buffer.clone() for buffer in self._model.buffers()]
        yield
        for buffer, value in zip(self._model.buffers(), before, strict=True):
            buffer.copy_(value)

    # ------------------------------------------------------------------------------------------------------ one step

    def step(self, batch: Batch | None, lr: float) -> StepOutput:
        """Compute the ticket, push it, and wait for the weights that its mode has us wait for."""
        assert batch is not None, "build() made sure that every worker has a sample"
        self._settled = False
        told = self._pass(batch)
        self.own_time.stop()
        for server in self._servers:
            self._push(server, self._mine, self._n, told, self._packed(server))
        self._model.zero_grad()
        self._refresh()
        self._n += 1
        return StepOutput(torch.zeros((), dtype=torch.float64, device=self._device))

    def _pass(self, batch: Batch) -> _Told:
        """Leave the gradient in ``.grad``; what else a push says of it, from the loss on."""
        batch = batch.to(self._device)
        parts = min(self._train.accumulate, batch.global_count // self._count)
        losses, weights = [], []
        for part in [batch] if parts == 1 else batch.split(parts):
            with self._precision():
                total, weight = self._criterion(self._model(part.inputs), part.targets)
            loss = total / batch.global_count
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
            weights.append(torch.tensor(len(part)) if weight is None else weight.detach().double())
        return float(sum(losses)), float(sum(weights)), len(batch), batch.global_count

    def _precision(self) -> AbstractContextManager[object]:
        bf16 = self._train.precision == "bf16"
        return torch.autocast(self._device.type, torch.bfloat16) if bf16 else nullcontext()

    def _packed(self, server: int) -> Tensor:
        """The gradients that concern ``server``, in memory that the next step overwrites."""
        gradients = [_rows(p.grad, rows) for p, rows in self._placed[server] if p.grad is not None]
        packed = self._outbox[server] = self._places[server].pack(gradients, self._outbox[server])
        return packed

    def _push(self, server: int, share: int, step: int, told: _Told, payload: Tensor) -> None:
        pushed = _Push(step, share, self._versions[server], *told)
        self._mail.send(server, Kind.PUSH, pushed.numbers(), payload)

    def _refresh(self) -> None:
        """Take new weights from every server, and only when all have come: until then a server may ask for a share of
        the same step, which needs the old ones."""
        come = [self._await(Kind.WEIGHTS) for _ in self._servers]
        with torch.no_grad():
            for message in come:
                self._fill(message)
                self._versions[message.sender] = int(message.numbers[0])

    def _fill(self, message: Message) -> None:
        placed = self._placed[message.sender]
        if placed:
            views = self._places[message.sender].views(message.payload)
            torch._foreach_copy_([_rows(p, rows) for p, rows in placed], views)

    # ------------------------------------------------------------------------------------------- for others and for all

    def _take(self, message: Message) -> None:
        if message.kind is Kind.REISSUE:
            self._stand_in(message.sender, int(message.numbers[0]), int(message.numbers[1]))
        elif message.kind is Kind.ASK:
            buffers = [*self._part.buffers()]
            self._mail.send(0, Kind.BUFFERS, payload=Flat(buffers).pack(buffers))
        else:
            super()._take(message)

    def _stand_in(self, server: int, step: int, share: int) -> None:
        """Compute a dead worker's ticket for ``server``; once, if other servers ask for it as well."""
        assert self._again is not None, "begin() comes before the first step"
        if self._again_done.get(share, (-1,))[0] != step:
            batch = self._again(step, Share(share, self._count))
            with self._buffers_kept():
                told = self._pass(batch)
            payloads = {server: self._packed(server).clone() for server in self._servers}
            self._again_done[share] = step, payloads, told
            self._model.zero_grad()
        _, payloads, told = self._again_done[share]
        self._push(server, share, step, told, payloads[server])

    @torch.no_grad()
    def evaluate(self, batch: Batch | None, measure: Measure) -> Sums:
        if batch is None or not len(batch):
            return Sums({}, 0)
        self._model.eval()
        with self._precision():
            batch = batch.to(self._device)
            found = Sums(measure(self._model(batch.inputs), batch.targets), len(batch))
        self._model.train()
        return found


def _rows(tensor: Tensor, rows: tuple[int, int] | None) -> Tensor:
    """These rows of it, live; None: all of it."""
    return tensor if rows is None else tensor[rows[0] : rows[1]]
