"""The strategy of a job that writes its own step. Ranks have replicas of several networks, each with an optimizer.

Gradients are added up over the ranks after the backward pass, in one order. No hook sits in the backward pass, so any
number of passes in any order is right, and priming is not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

from toolkit.base.errors import ConfigError
from toolkit.config import StrategyConfig
from toolkit.metrics.meters import stopwatch
from toolkit.ranks.batch import Batch, Share
from toolkit.ranks.collectives import broadcast_tensors, sum_tensors
from toolkit.ranks.session import Session
from toolkit.ranks.state import Entry, Json, Replicated
from toolkit.strategies.models import evaluating, refuse_extra_state, to_training_mode
from toolkit.strategies.objective import Measure, Sums, measured
from toolkit.strategies.priming import unused_message
from toolkit.strategies.protocol import ModelFactory, OptimizerFactory, StepOutput, SynchronousStrategy
from toolkit.strategies.update import OptimizerWrapper

T = TypeVar("T")


class Custom(SynchronousStrategy):
    """A :class:`~.protocol.Strategy` whose step is a job's ``train_step(step, batch)``; ``step`` is this object::

    >>> class Autoencoder(toolkit.Job):
    ...     def train_step(self, step: toolkit.Custom, batch: toolkit.Batch) -> torch.Tensor:
    ...         decoded = step.networks["decoder"](step.networks["encoder"](batch.inputs))
    ...         loss = (decoded - batch.inputs).square().sum() / batch.global_count
    ...         step.descend("encoder", loss, retain_graph=True)
    ...         step.descend("decoder", loss)
    ...         return loss.detach()
    """

    evaluates_together = False

    #: The networks, by the names given to :meth:`build`. Checkpoints have their weights as ``model/<network>.<name>``.
    networks: nn.ModuleDict
    _updates: dict[str, OptimizerWrapper]

    def __init__(self, config: StrategyConfig, session: Session, train_step: Callable[[Custom, Batch], Tensor]) -> None:
        """Take the job's ``train_step``. It returns this rank's part of the loss to log, a scalar.

        Raises ConfigError if the config asks for one of the toolkit's own strategies.
        """
        if config.name != "custom":
            raise ConfigError(
                f"strategy.name: {config.name!r} is not what this job does: its step is its own, on replicas; set it "
                "to custom"
            )
        self.share = Share(session.rank, session.world_size)
        self.device = self._device = session.device
        self.local_stopwatch = stopwatch(session.device)
        self._train_step = train_step
        self.lr = 0.0  #: the schedule's rate in this step
        self._is_timed = False

    def build(self, networks: Mapping[str, tuple[ModelFactory, OptimizerFactory]]) -> None:
        """Make the networks with rank 0's first weights. They are in evaluation mode only while evaluated."""
        models = {name: to_training_mode(make().to(self.device)) for name, (make, _) in networks.items()}
        self.networks = nn.ModuleDict(models)
        broadcast_tensors([*self.networks.parameters(), *self.networks.buffers()], source=0)
        refuse_extra_state(self.networks, "custom")
        optimizers = {name: make(self.networks[name]) for name, (_, make) in networks.items()}
        self._updates = {
            name: OptimizerWrapper(self.networks[name], optimizer) for name, optimizer in optimizers.items()
        }

    def descend(self, network: str, loss: Tensor, lr: float | None = None) -> None:
        """Make one step of a network's optimizer along the gradient of ``loss``.

        No other network's weights get a gradient. ``loss`` is this rank's part; the gradients are added up over the
        ranks. A loss that is summed over the samples of the batch and divided by its ``global_count`` gives the
        gradient of the mean over the global batch, however it is shared. ``lr`` is the schedule's by default. Raises
        ConfigError if the loss does not depend on every weight.
        """
        named = [(name, weight) for name, weight in self.networks[network].named_parameters() if weight.requires_grad]
        # Only this network's weights get a gradient, though the loss may run through other networks.
        loss.backward(inputs=[weight for _, weight in named])  # type: ignore[no-untyped-call]
        if unused := [name for name, weight in named if weight.grad is None]:
            raise ConfigError(unused_message([f"{network}.{name}" for name in unused]))
        if not self._is_timed:  # the first wait of the step
            self.local_stopwatch.stop()
            self._is_timed = True
        sum_tensors([weight.grad for _, weight in named if weight.grad is not None])
        self._updates[network].apply(self.lr if lr is None else lr)

    def prepare_split_data(self) -> None:
        for update in self._updates.values():
            update.average_statistics()

    def step(self, batch: Batch | None, lr: float) -> StepOutput:
        assert batch is not None, "every rank has a share"
        self._is_timed = False
        self.lr = lr
        for update in self._updates.values():
            update.begin()
        return StepOutput(self._train_step(self, batch))

    @torch.no_grad()
    def evaluate(self, batch: Batch | None, measure: Measure) -> Sums:
        for update in self._updates.values():
            update.broadcast_buffers()
        if batch is None or not len(batch):
            return Sums({}, 0)
        batch = batch.to(self.device)
        with evaluating(self.networks):
            return measured(measure, self.networks, batch)

    def state(self) -> dict[str, Entry]:
        """Return the state of all networks. A collective, since buffers are broadcast first."""
        for update in self._updates.values():
            update.broadcast_buffers()
        weights = self.networks.state_dict()
        entries: dict[str, Entry] = {f"model/{name}": Replicated(value.detach()) for name, value in weights.items()}
        for network, update in self._updates.items():
            entries |= _of(network, update.state())
        return entries

    def live_state(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for network, update in self._updates.items():
            found |= _of(network, update.live_state())
        return found

    def on_loaded(self, values: Mapping[str, Json]) -> None:
        for network, update in self._updates.items():
            # Each network's update gets its own entries, under the names that it has without the network.
            own: dict[str, Json] = {}
            for name, value in values.items():
                kind, _, rest = name.partition("/")
                if rest.startswith(f"{network}."):
                    own[f"{kind}/{rest.removeprefix(f'{network}.')}"] = value
            update.on_loaded(own)

    def close(self) -> None:
        for name in ("networks", "_updates"):
            self.__dict__.pop(name, None)


def _of(network: str, entries: Mapping[str, T]) -> dict[str, T]:
    """Return the entries with the network in their names: ``optim/generator.0.weight/exp_avg``."""
    named = {}
    for name, entry in entries.items():
        kind, _, rest = name.partition("/")
        named[f"{kind}/{network}.{rest}"] = entry
    return named
