"""pipeline: each rank has some of the model's layers, and micro-batches pass through the ranks one after the other.

The schedules are torch's: GPipe (https://arxiv.org/abs/1811.06965), 1F1B (https://arxiv.org/abs/1806.03377) and
interleaved 1F1B (https://arxiv.org/abs/2104.04473), in which each rank has several stages. With p ranks and m
micro-batches a rank idles (p - 1) / (m + p - 1) of a step, interleaved (p - 1) / (v * m + p - 1) with v stages on each.

The ranks form a grid ``stages`` x ``replicas``. The ranks of one stage are consecutive, so those of a node sum
gradients among themselves and a pipeline goes from node to node. All ranks of a pipeline hold the same share. Gradients
are summed over the replicas after the last backward pass.

Shapes must be the same in every micro-batch of a step. If a share does not divide evenly, shorter ones are filled up
with a copy of their last sample, whose outputs the criterion never sees: gradients and loss are exact. (A batch norm
sees it.)

Random numbers. The loop seeds every stage alike, so all would drop out the same places. Each pass of a micro-batch
through a stage therefore has a seed of its own, which follows from the step's seed, the stage and the micro-batch. It
is the same in every schedule, and in a resume.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from toolkit import logs
from toolkit.config import StrategyConfig, TrainConfig, check_pipeline, choose, mesh_of, micro_batches
from toolkit.errors import ConfigError
from toolkit.hang.activity import PRIMING
from toolkit.metrics.stopwatch import stopwatch
from toolkit.ranks.batch import Batch, Share
from toolkit.ranks.collectives import broadcast_tensors, sum_across_ranks, sum_in_order, sum_tensors
from toolkit.ranks.session import Session
from toolkit.ranks.state import Entry, Json, Replicated
from toolkit.strategies.blocks import checkpoint_activations
from toolkit.strategies.extra_state import refuse_extra_state
from toolkit.strategies.layouts import autocast
from toolkit.strategies.layouts.first_values import made
from toolkit.strategies.layouts.mesh import open_mesh
from toolkit.strategies.learnt import refuse_learnt
from toolkit.strategies.modes import evaluating, in_training
from toolkit.strategies.objective import (
    Forward,
    Loss,
    Measure,
    Objective,
    Sums,
    given_to_model,
    means_of,
    measured,
    refuse_other_weights,
    weights_of,
)
from toolkit.strategies.pipeline import stages as layers
from toolkit.strategies.pipeline.scattered import on_every_rank
from toolkit.strategies.priming import (
    CheckedObjective,
    random_state,
    refuse_together,
    same_randomness,
    undone,
    unused_message,
    without_gradient,
)
from toolkit.strategies.protocol import AllNeeded, ModelFactory, OptimizerFactory, StepOutput
from toolkit.strategies.spmd import compile_errors
from toolkit.strategies.update import Update

log = logs.get(__name__)


class Pipeline(AllNeeded):
    """See :class:`~toolkit.strategies.protocol.Strategy`."""

    evaluates_together = True

    _model: nn.Module  #: the layers of the whole model that this rank has
    _parts: list[_Stage]  #: this rank's stages, in the order of the pipeline
    _schedule: Any
    _update: Update
    _objective: Objective
    _outputs: _Shape  #: of the whole model, for one sample
    _weighs: bool  #: whether the losses have weights of their own
    _names: tuple[str, ...]  #: of the losses
    _batches: list[Batch]  #: the micro-batches of the step
    _found: dict[int, dict[str, Loss]]  #: the losses of each, on the rank of the last stage

    def __init__(self, session: Session, config: StrategyConfig, train: TrainConfig) -> None:
        """Take this rank's place in the mesh. Raises ConfigError if the mesh does not match the number of ranks."""
        self._config, self._train, self._session = config, train, session
        self._world_size = session.world_size
        sizes = mesh_of(config, session.world_size)
        self._ranks, self._replicas = sizes.stages or 1, sizes.replicas or 1
        self._place, replica = divmod(session.rank, self._replicas)
        self.share = Share(replica, self._replicas)
        per_rank = config.pipeline.stages_per_rank if self._is_interleaved else 1
        # Interleaved stages go round: with p ranks, place k has the stages k, k + p, k + 2p, ...
        self._stages = range(self._place, self._ranks * per_rank, self._ranks)  #: of this rank
        self._count = self._ranks * per_rank
        self._device = session.device
        self._activity = session.activity
        self._buffers_equal = False
        self.own_time = stopwatch(session.device)

    @property
    def _is_interleaved(self) -> bool:
        return self._config.pipeline.schedule == "interleaved" and self._ranks > 1

    @property
    def _is_first(self) -> bool:
        return self._place == 0

    @property
    def _is_last(self) -> bool:
        return self._place == self._ranks - 1

    def build(
        self, model: ModelFactory, optimizer: OptimizerFactory, objective: Objective, sample: Batch | None
    ) -> None:
        """Cut the model, take this rank's stages and prime.

        Raises ConfigError if the model cannot be cut, a parameter gets no gradient, or compiling fails.
        """
        refuse_learnt(objective, "pipeline")
        batch = self._checked(sample)
        mesh = open_mesh(self._session, {"stage": self._ranks, "replica": self._replicas})
        self._line, self._replica_group = mesh.get_group("stage"), mesh.get_group("replica")
        self._objective = objective
        # The smallest share limits the number of micro-batches: each must have a sample.
        smallest = batch.global_count // self._replicas
        self._micro_batches = micro_batches(self._config.pipeline, self._ranks, smallest, least=self._train.accumulate)
        self._size = -(-len(batch) // self._micro_batches)
        # The plan needs two samples: the first one is given twice.
        self._place_model(model, torch.cat([self._inputs(objective, batch.part(0, 1))] * 2))
        total = partial(sum_in_order, group=self._line)
        self._update = Update(self._model, optimizer(self._model), self._train, total)
        self._schedule = self._make_schedule()
        with compile_errors(self._train.compile), _plainly():
            self._prime(batch)

    def split_data(self) -> None:
        if self._replicas > 1:
            self._update.average_statistics(self._replica_group)

    def step(self, batch: Batch | None, lr: float) -> StepOutput:
        assert batch is not None, "build() made sure that every share holds a sample"
        self._buffers_equal = False
        self._update.begin()
        means = self._forward_backward(batch)
        return StepOutput.of(means, self._update.apply(lr))

    @torch.no_grad()
    def evaluate(self, batch: Batch | None, measure: Measure) -> Sums:
        self._equalise_buffers()
        self._update.evaluating()
        if batch is None or not len(batch):
            return Sums({}, 0)
        batch = batch.to(self._device)
        with evaluating(self._model):
            parts = batch.split(min(self._micro_batches, len(batch)))
            outputs = self._pass([self._inputs(measure, part) for part in parts])
        # Outputs exist on the last stage's rank only; the others measure zeros, to have the same names.
        with self._precision():
            if self._is_last:
                made = torch.cat(outputs)
                return measured(measure, lambda *_: made, batch)
            nothing = self._outputs.empty(len(batch), self._device).zero_()
            return measured(measure, lambda *_: nothing, batch).uncounted()

    def state(self) -> dict[str, Entry]:
        """Return ``model/<name>`` and ``optim/<parameter>/<slot>`` of all stages; a collective.

        See :mod:`.scattered`.
        """
        self._update.begin()
        self._equalise_buffers()
        weights = {f"model/{name}": Replicated(value) for name, value in self._model.state_dict().items()}
        return on_every_rank({**weights, **self._update.state()})

    def live(self) -> dict[str, Tensor]:
        weights = {f"weights/{name}": value.detach() for name, value in self._model.named_parameters()}
        buffers = {f"buffers/{name}": value for name, value in self._model.named_buffers()}
        return weights | buffers | self._update.live()

    def figures(self) -> dict[str, float]:
        return self._update.figures()

    def loaded(self, values: Mapping[str, Json]) -> None:
        """Send what was loaded to all replicas of a stage. A collective: only the first replica has been filled."""
        if self._replicas > 1 and self._ranks > 1:
            broadcast_tensors(self.live().values(), self._first_replica, self._replica_group)
        self._update.loaded(values)
        self._buffers_equal = True

    def close(self) -> None:
        for name in ("_model", "_parts", "_schedule", "_update", "_objective", "_batches", "_found"):
            self.__dict__.pop(name, None)

    # ------------------------------------------------------------------------------------------------ one step

    def _forward_backward(self, batch: Batch) -> dict[str, Tensor]:
        """Leave the gradient of the global mean loss in ``.grad``.

        Returns this rank's part of each loss, by name.
        """
        self._batches = batch.to(self._device).split(self._micro_batches)
        self._found = {}
        seed = int(torch.randint(1 << 62, ()))  # equal in a pipeline, whose ranks were seeded alike
        for part in self._parts:
            part.begin(seed)
        self.own_time.stop()  # from here on ranks wait for each other
        # The first stage gets the inputs, the last stage the numbers of the micro-batches, by which _loss() finds them.
        given = [self._inputs(self._objective, each) for each in self._batches] if self._is_first else []
        inputs = (torch.cat([_filled(each, self._size) for each in given]),) if given else ()
        numbers = torch.arange(self._micro_batches) if self._is_last else None
        self._schedule.step(*inputs, target=numbers, return_outputs=False)
        return self._complete(batch.global_count)

    def _loss(self, outputs: Tensor, number: Tensor) -> Tensor:
        """Return the loss of micro-batch ``number``, as if each sample of the global batch weighed one.

        torch's pipelining also calls it to probe.
        """
        batch = self._batches[int(number)]
        with self._precision():
            losses = self._objective(lambda *_: outputs[: len(batch)], batch)
        refuse_other_weights(losses, "strategy.name: pipeline")
        parts = {name: loss.total / batch.global_count for name, loss in losses.items()}
        self._found[int(number)] = {name: Loss(part.detach(), losses[name].weight) for name, part in parts.items()}
        first, *others = parts.values()
        return sum(others, first)

    def _inputs(self, call: Callable[[Forward, Batch], object], batch: Batch) -> Tensor:
        """Return what a loss or a measure gives the model for ``batch``.

        Raises ConfigError unless that is one tensor.
        """
        args, kwargs = given_to_model(call, batch) or ((), {})
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
            given = [type(value).__name__ for value in args] + [f"{name}=..." for name in kwargs]
            raise ConfigError(
                "strategy.name: pipeline hands one tensor from layer to layer, and the job calls the model with "
                f"({', '.join(given)}): give it one tensor, or use ddp or fsdp"
            )
        return args[0]

    def _complete(self, samples: int) -> dict[str, Tensor]:
        """Turn the gradients of this pipeline into those of the global batch; return the mean losses."""
        gradients = self._gradients()
        if self._replicas > 1:
            sum_tensors(gradients, self._replica_group)
        passes = [*self._found.values()]
        nothing = {name: torch.zeros((), device=self._device) for name in self._names}
        means = means_of(passes) if passes else nothing
        if not self._weighs:
            return means
        # Losses with weights of their own: only the last stage's ranks know them, so all ranks sum.
        weights = [weight.detach().double() for weight in weights_of(passes) if weight is not None]
        weight = torch.stack(weights).sum() if weights else torch.zeros((), dtype=torch.float64, device=self._device)
        factor = (samples / sum_across_ranks(weight).clamp(min=1e-30)).float()  # a weight of 0 leaves gradients of 0
        torch._foreach_mul_(gradients, factor)
        return {name: mean * factor for name, mean in means.items()}

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]

    def _precision(self) -> AbstractContextManager[object]:
        return autocast(self._device, self._train.precision)

    def _equalise_buffers(self) -> None:
        """Equalize the buffers of the replicas, which have other samples; see ``Update.equalise``."""
        if not self._buffers_equal and self._replicas > 1:
            self._update.equalise(self._first_replica, self._replica_group)
        self._buffers_equal = True

    @property
    def _first_replica(self) -> int:
        return self._place * self._replicas

    # ----------------------------------------------------------------------------------------- forward passes only

    def _pass(self, batches: Sequence[Tensor]) -> list[Tensor]:
        """Return the outputs for each batch of inputs, on the last stage's rank. Batches may differ in size here.

        All ranks move in ticks. In each tick a rank passes one micro-batch through one of its stages and hands the
        result to the next rank, which takes it in the next tick. A round has as many micro-batches as there are ranks;
        these go through the first stage of each rank, then through the second. A rank sends and receives in one batch
        of operations, so that no order in which a backend makes them can block.
        """
        outputs: list[Tensor] = []
        received: Tensor | None = None
        rounds = -(-len(batches) // self._ranks)
        for tick in range(rounds * self._count + self._ranks - 1):
            made: Tensor | None = None
            if (turn := self._turn(tick, len(batches))) is not None:
                stage, number = turn
                part = self._parts[stage // self._ranks]
                made = part(batches[number] if received is None else received)
                if stage == self._count - 1:
                    outputs.append(made)
                    made = None
            # Every tick, also without a turn: the neighbors may send to this rank or wait for it.
            received = self._exchange(made, self._expected(tick + 1, batches))
        return outputs

    def _turn(self, tick: int, batches: int) -> tuple[int, int] | None:
        """Return the stage and the micro-batch of this rank's turn at ``tick``, None if it has none."""
        done = tick - self._place
        if done < 0:
            return None
        # A round takes ``_count`` ticks of this rank: for each of its stages, all micro-batches of the round.
        finished, inside = divmod(done, self._count)
        lap, number = divmod(inside, self._ranks)
        number += finished * self._ranks
        return (lap * self._ranks + self._place, number) if number < batches else None

    def _expected(self, tick: int, batches: Sequence[Tensor]) -> Tensor | None:
        """Return memory for this rank's input at ``tick``; None if it needs none.

        It needs none without a turn, and none in the first stage, whose input is the batch itself.
        """
        turn = self._turn(tick, len(batches))
        if turn is None or turn[0] == 0:
            return None
        return self._parts[turn[0] // self._ranks].takes.empty(len(batches[turn[1]]), self._device)

    def _exchange(self, made: Tensor | None, wanted: Tensor | None) -> Tensor | None:
        # To the next rank, from the previous one; the first rank follows the last one.
        near = [dist.get_global_rank(self._line, (self._place + way) % self._ranks) for way in (1, -1)]
        sends = [] if made is None else [dist.P2POp(dist.isend, made.contiguous(), near[0], self._line)]
        receives = [] if wanted is None else [dist.P2POp(dist.irecv, wanted, near[1], self._line)]
        for work in dist.batch_isend_irecv(sends + receives) if sends or receives else ():
            work.wait()
        return wanted

    # -------------------------------------------------------------------------------------------------- building

    def _checked(self, sample: Batch | None) -> Batch:
        samples = 0 if sample is None else sample.global_count
        check_pipeline(self._config, self._world_size, samples, self._train.accumulate)
        assert sample is not None
        return sample

    def _place_model(self, make: ModelFactory, inputs: Tensor) -> None:
        """Put this rank's layers on its device, with rank 0's weights. Only rank 0 makes the model with values."""
        model = made(make)
        refuse_extra_state(model, "a pipeline")
        if self._config.activation_checkpointing:
            checkpoint_activations(model)
        here = next(model.parameters()).device  # the inputs may be on the GPU already
        # Rank 0 plans for all: only its model has values.
        plan = _agreed(lambda: layers.plan(model, inputs.to(here), self._count, self._config.pipeline.split))
        # Rank 0 keeps all tensors to send them; every rank, rank 0 as well, then deletes the layers of other ranks.
        whole = layers.tensors(model, plan.kept(range(self._count))) if dist.get_rank() == 0 else {}
        layers.keep(model, plan.kept(self._stages))
        is_meta = any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
        self._model = in_training(model.to_empty(device=self._device) if is_meta else model.to(self._device))
        self._hand_out(whole, plan)
        self._parts = [self._stage(stage, plan.stages[stage]) for stage in self._stages]
        if dist.get_rank() == 0:
            cut = "; ".join(f"stage {number}: {', '.join(names)}" for number, names in enumerate(plan.stages))
            shape = self._replicas, self._ranks, self._micro_batches, self._size
            log.info("pipelines: %d, of %d ranks each, with %d micro-batches of %d samples; %s", *shape, cut)

    def _stage(self, stage: int, names: Sequence[str]) -> _Stage:
        chain = [self._model.get_submodule(name) for name in names]
        part = _Stage(stage * self._micro_batches, chain, self._precision, self._device)
        if self._train.compile:
            part.chain.compile()
        return part

    def _hand_out(self, whole: Mapping[str, Tensor], plan: layers.StagePlan) -> None:
        """Send each other rank the tensors of its layers from rank 0, one at a time."""
        if dist.get_rank():
            # Rank 0 sends in the same order, the model's.
            for tensor in layers.tensors(self._model, plan.kept(self._stages)).values():
                arrived = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
                dist.recv(arrived, 0)
                tensor.copy_(arrived)
            return
        for rank in range(1, self._world_size):
            stages = range(rank // self._replicas, self._count, self._ranks)
            for name, tensor in whole.items():
                if layers.owner(name, plan.kept(stages)) is not None:
                    dist.send(tensor.to(self._device).contiguous(), rank)

    def _make_schedule(self) -> Any:
        stages = [
            PipelineStage(part, stage, self._count, self._device, group=self._line)
            for part, stage in zip(self._parts, self._stages, strict=True)
        ]
        # torch scales no gradients: _loss() divides by the samples of the global batch.
        options: dict[str, Any] = {"loss_fn": self._loss, "scale_grads": False}
        if self._is_interleaved:
            return ScheduleInterleaved1F1B(stages, self._micro_batches, **options)  # type: ignore[arg-type]
        # A single rank makes the same steps with interleaved as with 1f1b.
        kinds: dict[str, Callable[..., Any]]
        kinds = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": Schedule1F1B}
        kind = choose("strategy.pipeline.schedule", self._config.pipeline.schedule, kinds)
        return kind(stages[0], self._micro_batches, **options)

    def _prime(self, batch: Batch) -> None:
        """Make one pass that changes only torch's pipeline (and the compiler's cache)."""
        self._activity.phase = PRIMING
        self._weighs, self._names = False, ("",)
        # For this pass the objective checks its losses. Its first call is torch's probe.
        objective, self._objective = (
            self._objective,
            (checked := CheckedObjective(self._objective, self._train, probes=1)),
        )
        self._refuse_random(objective, batch)
        with undone(self._model):
            self.own_time.start()
            self._forward_backward(batch)
        self._objective, self._names = objective, checked.names
        self.own_time.take()  # it may have compiled the model
        # Only after the pass, in which the other ranks would wait for one that raised.
        refuse_together(checked.refusal)
        self._learn()
        self._update.drop()

    def _refuse_random(self, objective: Objective, batch: Batch) -> None:
        """Refuse a loss that draws random numbers for the model's inputs. The last stage would draw other ones."""
        with same_randomness():
            before = random_state()
            self._inputs(objective, batch.part(0, 1))
            drawn = random_state() != before
        if drawn:
            raise ConfigError(
                "strategy.name: pipeline makes the model's inputs on one rank and the loss on another, and the loss "
                f"({objective.where}) draws random numbers before it calls the model; draw them in the data set, or "
                "use ddp or fsdp"
            )

    def _learn(self) -> None:
        """Tell every rank what priming showed on every stage. Raises ConfigError, on all ranks alike."""
        unused = without_gradient(self._model)
        weighs = any(weight is not None for weight in weights_of([*self._found.values()]))
        told: list[Any] = [None] * self._world_size
        dist.all_gather_object(told, (unused, self._parts[-1].gives, weighs, self._names))
        if unused := [name for found in told for name in found[0]]:
            raise ConfigError(unused_message(sorted(set(unused), key=unused.index)))
        self._outputs = told[-1][1]  # of the last rank, which has the last stage
        self._weighs, self._names = told[-1][2:]


@dataclass(frozen=True)
class _Shape:
    """The shape of a tensor, without the number of samples in its first dimension."""

    row: tuple[int, ...]
    dtype: torch.dtype

    def empty(self, samples: int, device: torch.device) -> Tensor:
        return torch.empty((samples, *self.row), dtype=self.dtype, device=device)


class _Stage(nn.Module):
    """One stage: its layers in a row, as torch's pipelining wants them."""

    takes: _Shape
    gives: _Shape

    def __init__(
        self,
        number: int,
        chain: Sequence[nn.Module],
        precision: Callable[[], AbstractContextManager[object]],
        device: torch.device,
    ) -> None:
        """Make a stage of the layers ``chain``.

        ``number`` sets its random numbers apart from those of other stages; stages are as many numbers apart as there
        are micro-batches.
        """
        super().__init__()
        self.chain = nn.Sequential(*chain)
        self._number, self._precision, self._device = number, precision, device
        self._seed = 0

    def begin(self, seed: int) -> None:
        """Begin a step; its micro-batches follow in the order of their numbers."""
        self._seed = seed + self._number

    def forward(self, inputs: Tensor) -> Tensor:
        # A stage passes micro-batches in the order of their numbers, so a counter gives each its seed.
        if self.training:
            _seed(self._seed, self._device)
            self._seed += 1
        with self._precision():
            outputs: Tensor = self.chain(inputs)
        self.takes, self.gives = (_Shape(tuple(each.shape[1:]), each.dtype) for each in (inputs, outputs))
        return outputs


def _seed(number: int, device: torch.device) -> None:
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed(number)


def _filled(inputs: Tensor, size: int) -> Tensor:
    """Return ``inputs`` with copies of its last sample at the end, ``size`` samples in all."""
    return torch.cat([inputs, inputs[-1:].expand(size - len(inputs), *inputs.shape[1:])])


def _agreed(make: Callable[[], layers.StagePlan]) -> layers.StagePlan:
    """Return what rank 0 makes, on every rank. Raises its ConfigError on every rank."""
    told: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            told[0] = make()
        except ConfigError as error:
            told[1] = str(error)
    dist.broadcast_object_list(told, 0)
    if told[1] is not None:
        raise ConfigError(told[1])
    return cast(layers.StagePlan, told[0])


@contextmanager
def _plainly() -> Iterator[None]:
    """Raise the error of a layer itself, which torch's pipelining hides behind one of its own."""
    try:
        yield
    except RuntimeError as error:
        if "failed to run forward" in str(error) and error.__cause__ is not None:
            raise error.__cause__ from None
        raise
