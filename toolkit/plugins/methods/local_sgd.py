"""local_sgd: each rank steps by itself on its share of every batch. Every ``round_steps`` steps the ranks average.

A round ends in one of two ways. ``average``: the next round begins with the mean of the weights (local SGD, Stich 2019,
https://arxiv.org/abs/1805.09767), and of the inner optimizers' momenta (Yu, Jin and Yang 2019,
https://arxiv.org/abs/1905.03817). So all ranks are equal then, and any number of them, or ddp, can continue from there.
``diloco`` (Douillard et al. 2023, https://arxiv.org/abs/2311.08105): the way from a round's first weights to their mean
at its end is a gradient for an outer SGD with Nesterov momentum. Each rank keeps its inner optimizer's state.

A rank's gradient is that of the mean over its own share, and clipping uses that gradient's own norm. In the mean of the
weights a rank counts by how much its samples weighed in the round (McMahan et al. 2017,
https://arxiv.org/abs/1602.05629): rounds of one step with SGD are the steps of one process, however uneven the shares.

The steps before ``after_steps`` are those of ddp (post-local SGD, Lin et al. 2020, https://arxiv.org/abs/1808.07217).
Rounds end after each step whose number ``round_steps`` divides, so the first one may be shorter.

Inside a round the ranks' mean is evaluated, exported, and stored as ``model/<name>``. With it each rank stores its own
weights as ``replica/rank3/<name>`` and its optimizer's state as ``optim/rank3/<parameter>/<slot>``. Buffers are share
0's, as under ddp.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from toolkit.base.errors import ConfigError
from toolkit.config import StrategyConfig, TrainConfig, choose
from toolkit.config.strategy import LocalSgdConfig
from toolkit.ranks.batch import Batch
from toolkit.ranks.collectives import sum_across_ranks, sum_tensors
from toolkit.ranks.session import Session
from toolkit.ranks.state import Entry, PerRank, Replicated
from toolkit.strategies import build_layout, layout_options
from toolkit.strategies.layouts import Layout, LocalReplica
from toolkit.strategies.objective import Loss, Measure, Objective, Sums, means_of, refuse_learnt, total_weight
from toolkit.strategies.protocol import REPLICA, ModelFactory, OptimizerFactory, StepOutput, Strategy
from toolkit.strategies.spmd import Spmd

#: Slots that count steps. They are equal on all ranks, and a mean would round them.
_COUNTERS = ("step", "mu_product")
_OUTER = "outer/"
_ANCHOR = "anchor/"


class Averaging:
    """What the ranks make of their weights at a round's end: the next round begins with the mean."""

    @property
    def keeps_slots(self) -> bool:
        """True if each rank's inner optimizer keeps its own state; otherwise that is averaged, too."""
        return False

    def begin(self) -> None:
        """Begin a round with the weights that the model has now."""

    def end(self) -> None:
        """Turn the mean of the ranks' weights, which the model holds, into the weights of the next round."""

    def prepare_load(self, names: Collection[str]) -> None:
        """Prepare for a checkpoint, see :class:`~toolkit.strategies.protocol.RoundBased`.

        Raises ConfigError if only the other kind can continue from it.
        """
        if any(name.startswith(_OUTER) for name in names):
            raise ConfigError(
                "strategy.local_sgd.outer: this run was trained with diloco, whose outer momentum would be lost; set "
                "it to diloco, or start a new run from its weights (model.init_from)"
            )

    def state(self, *, inside: bool) -> dict[str, Entry]:
        """Return what a resume needs, inside a round or at its end."""
        return {}


class DiLoCo(Averaging):
    """An outer step at a round's end: algorithm 1 of the paper, with momentum as in torch.optim.SGD."""

    def __init__(self, weights: Mapping[str, Tensor], lr: float, momentum: float) -> None:
        self._weights = weights
        self._lr, self._momentum = lr, momentum
        self._anchors: dict[str, Tensor] = {}  #: the weights that the round began with
        self._momenta: dict[str, Tensor] = {}

    @property
    def keeps_slots(self) -> bool:
        """False before the first round: the steps are ddp's, and so is the state."""
        return bool(self._anchors)

    def begin(self) -> None:
        if not self._anchors:
            self._allocate()
        torch._foreach_copy_(list(self._anchors.values()), [self._weights[name] for name in self._anchors])

    def end(self) -> None:
        weights = list(self._weights.values())
        anchors, momenta = ([kept[name] for name in self._weights] for kept in (self._anchors, self._momenta))
        # The way back from the mean to the anchor is the outer gradient; the step is Nesterov's.
        ways = torch._foreach_sub(anchors, weights)
        torch._foreach_mul_(momenta, self._momentum)
        torch._foreach_add_(momenta, ways)
        torch._foreach_add_(ways, momenta, alpha=self._momentum)
        torch._foreach_copy_(weights, anchors)
        torch._foreach_sub_(weights, ways, alpha=self._lr)

    def prepare_load(self, names: Collection[str]) -> None:
        # Without outer momenta the checkpoint must be from a round's end: the next round begins with its weights.
        self._anchors, self._momenta = {}, {}
        if any(name.startswith(_OUTER) for name in names):
            self._allocate()
        elif any(name.startswith(REPLICA) for name in names):
            raise ConfigError(
                "strategy.local_sgd.outer: the checkpoint was made inside a round that ends with an average, and "
                "diloco begins with a round; set it to average, or continue from a checkpoint at a round's end"
            )

    def state(self, *, inside: bool) -> dict[str, Entry]:
        entries: dict[str, Entry] = {}
        for name, momentum in self._momenta.items():
            entries[f"{_OUTER}{name}/momentum"] = Replicated(momentum)
        for name, anchor in self._anchors.items() if inside else ():  # at a round's end the anchors are the weights
            entries[f"{_ANCHOR}{name}"] = Replicated(anchor)
        return entries

    def _allocate(self) -> None:
        self._anchors = {name: torch.empty_like(weight) for name, weight in self._weights.items()}
        self._momenta = {name: torch.zeros_like(weight) for name, weight in self._weights.items()}


class LocalSgd(Spmd):
    """See :class:`~toolkit.strategies.protocol.Strategy` and :class:`~toolkit.strategies.protocol.RoundBased`."""

    _weights: dict[str, Tensor]  #: what is trained, live
    _meeting: Averaging

    def __init__(self, session: Session, config: LocalSgdConfig, layout: Layout, train: TrainConfig) -> None:
        super().__init__(session, layout, train)
        self._config = config
        self._rank = session.rank
        self._step = 0
        self._is_local = False
        self._inside = False  #: true while the ranks' weights differ
        self._shows_mean = False  #: true while the model has their mean and ``_own`` this rank's
        self._own: dict[str, Tensor] = {}
        self._round_weight = torch.zeros((), dtype=torch.float64, device=session.device)  #: of this rank, in this round
        self._steps_since = 0  #: steps since the last figures
        self._sent = 0  #: bytes sent in these steps
        self._spread: Tensor | None = None

    def build(
        self, model: ModelFactory, optimizer: OptimizerFactory, objective: Objective, sample: Batch | None
    ) -> None:
        refuse_learnt(objective, "local_sgd")
        super().build(model, optimizer, objective, sample)
        parameters = self._model.named_parameters()
        self._weights = {name: parameter.detach() for name, parameter in parameters if parameter.requires_grad}
        lr, momentum = self._config.outer_lr, self._config.outer_momentum
        meetings: dict[str, Callable[[], Averaging]] = {
            "average": Averaging,
            "diloco": lambda: DiLoCo(self._weights, lr, momentum),
        }
        self._meeting = choose("strategy.local_sgd.outer", self._config.outer, meetings)()

    def prepare_split_data(self) -> None:
        """Do nothing: statistics stay share 0's, since ranks exchange nothing within a round."""

    def step(self, batch: Batch | None, lr: float) -> StepOutput:
        # A mean over one rank changes nothing. diloco's outer step does, so a single rank has rounds there as well.
        alone = self.share.count == 1 and self._config.outer == "average"
        # A resume with a larger after_steps changes nothing once ranks differ: ddp's steps are for equal ones.
        ranks_differ = self._inside or self._meeting.keeps_slots
        self._is_local = (ranks_differ or self._step >= self._config.after_steps) and not alone
        with torch.no_grad():
            # Each rank continues with its own weights, where the model has shown their mean.
            if self._shows_mean:
                torch._foreach_copy_(list(self._weights.values()), [self._own[name] for name in self._weights])
                self._shows_mean = False
            if self._is_local and not self._inside:
                self._meeting.begin()
        output = super().step(batch, lr)
        self._step += 1
        self._steps_since += 1
        if self._is_local:
            self._inside = True
            if self._step % self._config.round_steps == 0:
                self._meet()
        # Steps before after_steps are ddp's and send a whole gradient.
        elif self.share.count > 1:
            self._sent += self._size_bytes()
        return output

    def evaluate(self, batch: Batch | None, measure: Measure) -> Sums:
        self._show_mean()
        return super().evaluate(batch, measure)

    def state(self) -> dict[str, Entry]:
        self._show_mean()
        return super().state()

    def _declared(self, extra: Mapping[str, Entry]) -> dict[str, Entry]:
        found = super()._declared(extra)
        # Where the optimizers' states differ between the ranks, each rank stores its own.
        if self._inside or self._meeting.keeps_slots:
            found, same = {}, found
            for name, entry in same.items():
                kind, _, rest = name.partition("/")
                if kind == "model" or not isinstance(entry.value, Tensor):
                    found[name] = entry
                else:  # on another number of ranks each starts from the mean
                    found[f"{kind}/rank{self._rank}/{rest}"] = PerRank(entry.value, averages=True)
        if self._inside:
            found |= {f"{REPLICA}rank{self._rank}/{name}": PerRank(own) for name, own in self._own.items()}
            found[f"round/rank{self._rank}/weighed"] = PerRank(self._round_weight)
        return found | self._meeting.state(inside=self._inside)

    def live_state(self) -> dict[str, Tensor]:
        own = {f"weights/{name}": value for name, value in self._own.items()} if self._shows_mean else {}
        return super().live_state() | own

    def prepare_load(self, step: int, names: Collection[str]) -> dict[str, Entry]:
        self._step = step
        self._inside = self._shows_mean = any(name.startswith(REPLICA) for name in names)
        # A checkpoint from inside a round has each rank's own weights: make the places for them.
        if self._inside:
            self._own = {name: torch.empty_like(weight) for name, weight in self._weights.items()}
        self._round_weight.zero_()
        self._meeting.prepare_load(names)
        return self._declared(self._extra.places())

    def step_metrics(self) -> dict[str, float]:
        """Return the figures of the last window. A collective if a round has ended since the last call."""
        found = {
            **super().step_metrics(),
            "local_sgd/bytes_per_step": self._sent / max(1, self._steps_since),
            "local_sgd/bytes_per_step_of_ddp": float(self._size_bytes()),
        }
        if self._spread is not None:
            found["local_sgd/divergence"] = sum_across_ranks(self._spread).sqrt().item()
        self._sent, self._steps_since, self._spread = 0, 0, None
        return found

    def close(self) -> None:
        super().close()
        for name in ("_weights", "_own", "_meeting"):
            self.__dict__.pop(name, None)

    def _forward_backward(self, batch: Batch) -> dict[str, Tensor]:
        """Leave the gradient of this rank's mean in ``.grad``. Return its part of each global mean loss, by name."""
        if not self._is_local:
            return super()._forward_backward(batch)
        passes: list[dict[str, Loss]] = []
        with self._layout.without_sync():
            for micro_batch in self._micro_batches(batch):
                self._forward(micro_batch, passes, "strategy.name: local_sgd").backward()  # type: ignore[no-untyped-call]
        self.local_stopwatch.stop()
        # How much this share weighs: the sum of the criterion's weights, or else the number of samples.
        given = total_weight(passes)
        own = torch.full_like(self._round_weight, len(batch)) if given is None else given
        self._round_weight += own
        # The passes assumed that each rank has an equal part of the global batch's weight.
        if given is not None or len(batch) * self.share.count != batch.global_count:
            self._reweigh(own, batch.global_count / self.share.count)
        factor: Tensor | float = 1 / self.share.count
        if given is None:
            return means_of(passes, factor)
        weight = sum_across_ranks(own.clone())  # only for the reported loss; a step's only message
        self._sent += weight.nbytes
        return means_of(passes, factor * (batch.global_count / weight.clamp(min=1e-30)).float())

    def _show_mean(self) -> None:
        if self._inside and not self._shows_mean:
            self._average(self._part())

    @torch.no_grad()
    def _average(self, part: Tensor) -> None:
        """Give the model the mean of the ranks' weights. Each rank's own are put aside."""
        if not self._own:
            self._own = {name: torch.empty_like(weight) for name, weight in self._weights.items()}
        torch._foreach_copy_([self._own[name] for name in self._weights], list(self._weights.values()))
        self._sent += sum_tensors(self._weights.values(), part=part)
        self._shows_mean = True

    def _part(self) -> Tensor:
        """Return this rank's part of the mean. Parts are equal if no sample of the round weighed anything."""
        mine = self._round_weight.clamp(min=1e-30)
        total = sum_across_ranks(mine.clone())
        self._sent += total.nbytes
        return mine / total

    @torch.no_grad()
    def _meet(self) -> None:
        part = self._part()
        self._average(part)
        # The divergence is measured before the outer step changes the mean: the squared distance of the ranks' weights
        # from their mean, over its squared length, float64.
        mean = list(self._weights.values())
        apart = torch.stack(torch._foreach_norm(torch._foreach_sub(list(self._own.values()), mean)))
        length = torch.stack(torch._foreach_norm(mean))
        self._spread = part * (apart.double().square().sum() / length.double().square().sum().clamp(min=1e-30))
        if not self._meeting.keeps_slots:
            self._sent += sum_tensors(self._slots(), part=part)
        self._meeting.end()
        self._inside = self._shows_mean = False
        self._round_weight.zero_()

    def _slots(self) -> list[Tensor]:
        """Return the tensors of the update's state that differ between the ranks. They follow the gradients."""
        entries = self._update.state().items()
        tensors = [entry.value for name, entry in entries if name.rpartition("/")[2] not in _COUNTERS]
        return [value for value in tensors if isinstance(value, Tensor) and value.is_floating_point()]

    def _size_bytes(self) -> int:
        return sum(weight.nbytes for weight in self._weights.values())


def build(config: StrategyConfig, session: Session, train: TrainConfig) -> Strategy:
    """Return the strategy; its model is not built yet."""
    local: LocalSgdConfig = config.local_sgd
    if local.after_steps:
        layout = build_layout("ddp", config, session, train)
    else:  # it sends nothing, and has no DDP, whose buckets take as much memory as the model
        layout = LocalReplica(session, **layout_options(config, train))
    return LocalSgd(session, local, layout, train)
