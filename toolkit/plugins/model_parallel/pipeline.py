"""pipeline: each rank has some of the model's layers, and micro-batches pass through the ranks.

The schedules are torch's: GPipe (https://arxiv.org/abs/1811.06965), 1F1B (https://arxiv.org/abs/1806.03377) and
interleaved 1F1B (https://arxiv.org/abs/2104.04473), in which each rank has several stages.

The ranks form a grid ``stages`` x ``replicas``. The ranks of one stage are consecutive, so those of a node sum
gradients among themselves. All ranks of a pipeline hold the same share.

Shapes must be the same in every micro-batch of a step. Shorter ones are filled up with copies of their last sample,
whose outputs the criterion never sees: gradients and loss are exact. (A batch norm sees it.)

The loop seeds every stage alike, so all would drop out the same places. Each pass of a micro-batch through a stage
therefore has its own seed, from the step's seed, the stage and the micro-batch, in every schedule and in a resume.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B, schedules

from toolkit.base import logs
from toolkit.base.errors import ConfigError, ExtraForwardError
from toolkit.config import StrategyConfig, TrainConfig, choose
from toolkit.metrics.meters import stopwatch
from toolkit.plugins.model_parallel.checks import check_pipeline, micro_batches
from toolkit.plugins.model_parallel.stage_module import (
    ForwardOnly,
    Grid,
    LayerChain,
    RowShape,
    StageModule,
    declare_everywhere,
)
from toolkit.plugins.model_parallel.stages import place
from toolkit.ranks import older_torch
from toolkit.ranks.batch import Batch
from toolkit.ranks.collectives import broadcast_object, broadcast_tensors, sum_across_ranks, sum_in_order, sum_tensors
from toolkit.ranks.session import Session
from toolkit.ranks.state import Entry, Json, Replicated
from toolkit.strategies import refuse_gloo_on_gpus
from toolkit.strategies.layouts import autocast, open_mesh
from toolkit.strategies.models import evaluating, recompute_interval
from toolkit.strategies.objective import (
    Forward,
    Loss,
    Measure,
    Objective,
    Sums,
    capture_model_inputs,
    means_of,
    measured,
    refuse_learnt,
    refuse_other_weights,
    total_weight,
    weights_of,
)
from toolkit.strategies.priming import (
    CheckedObjective,
    params_without_grad,
    priming,
    refuse_together,
    rng_fingerprint,
    same_randomness,
)
from toolkit.strategies.protocol import ModelFactory, OptimizerFactory, StepOutput, Strategy, SynchronousStrategy
from toolkit.strategies.update import OptimizerWrapper

log = logs.get(__name__)


class Pipeline(SynchronousStrategy):
    """See :class:`~toolkit.strategies.protocol.Strategy`."""

    evaluates_together = True

    _model: nn.Module  #: the layers of the whole model that this rank has
    _stages: list[StageModule]  #: this rank's stages, in the order of the pipeline
    _forward_only: ForwardOnly
    _schedule: Any
    _no_outputs: dict[str, Any]  #: the option of a step that keeps no outputs, if torch has it
    _update: OptimizerWrapper
    _objective: Objective
    _hands_inputs: bool  #: whether layers of any stage are given the model's input
    _outputs: RowShape  #: of the whole model, for one sample
    _weighs: bool  #: whether the losses have weights of their own
    _names: tuple[str, ...]  #: of the losses
    _batches: list[Batch]  #: the micro-batches of the step
    _losses: dict[int, dict[str, Loss]]  #: of each micro-batch, on the rank of the last stage

    def __init__(self, session: Session, config: StrategyConfig, train: TrainConfig) -> None:
        """Take this rank's place in the mesh. Raises ConfigError if the mesh does not match the number of ranks."""
        self._config, self._train, self._session = config, train, session
        self._grid = Grid.of(config, session.rank, session.world_size)
        self.share = self._grid.share
        self._device = session.device
        self.local_stopwatch = stopwatch(session.device)

    def build(
        self, model: ModelFactory, optimizer: OptimizerFactory, objective: Objective, sample: Batch | None
    ) -> None:
        """Raises ConfigError if the model cannot be cut, a parameter gets no gradient, or compiling fails."""
        refuse_learnt(objective, "pipeline")
        samples = 0 if sample is None else sample.global_count
        check_pipeline(self._config, self._session.world_size, samples, self._train.accumulate)
        assert sample is not None, "check_pipeline() refuses a global batch of no samples"
        mesh = open_mesh(self._session, {"stage": self._grid.ranks, "replica": self._grid.replicas})
        self._line, self._replica_group = mesh.get_group("stage"), mesh.get_group("replica")
        self._objective = objective
        # The smallest share limits the number of micro-batches: each must have a sample.
        smallest = samples // self._grid.replicas
        accumulate = self._train.accumulate
        self._micro_batches = micro_batches(self._config.pipeline, self._grid.ranks, smallest, least=accumulate)
        self._size = -(-len(sample) // self._micro_batches)
        self._take_stages(model, sample)
        total = partial(sum_in_order, group=self._line)
        self._update = OptimizerWrapper(self._model, optimizer(self._model), self._train, total)
        self._prime(sample)

    def _take_stages(self, model: ModelFactory, sample: Batch) -> None:
        """Put this rank's layers on its device, and make stages and schedule of them."""
        # The plan needs two samples: the first one is given twice.
        inputs = torch.cat([_model_input(self._objective, sample.part(0, 1))] * 2)
        split, recompute = self._config.pipeline.split, recompute_interval(self._config)
        self._model, plan = place(model, inputs, self._grid, self._device, split=split, recompute=recompute)
        # Each stage calls its layers in a row; forward passes and torch's schedule share the stages.
        self._stages = []
        for stage in self._grid.stages:
            names = plan.stages[stage]
            chain = LayerChain([*map(self._model.get_submodule, names)], [name in plan.with_input for name in names])
            module = StageModule(stage * self._micro_batches, chain, self._precision, self._device)
            if self._train.compile:
                module.chain.compile()
            self._stages.append(module)
        self._hands_inputs = bool(plan.with_input)
        self._forward_only = ForwardOnly(self._grid, self._line, self._stages, self._device)
        schedule = self._config.pipeline.schedule
        self._schedule = build_schedule(
            schedule, self._grid, self._line, self._stages, self._device, self._micro_batches, self._loss
        )
        self._no_outputs = older_torch.supported_options(type(self._schedule).step, return_outputs=False)
        if self._session.is_main:
            cut = "; ".join(f"stage {number}: {', '.join(names)}" for number, names in enumerate(plan.stages))
            shape = self._grid.replicas, self._grid.ranks, self._micro_batches, self._size
            log.info("pipelines: %d, of %d ranks each, with %d micro-batches of %d samples; %s", *shape, cut)

    def prepare_split_data(self) -> None:
        if self._grid.replicas > 1:
            self._update.average_statistics(self._replica_group)

    def step(self, batch: Batch | None, lr: float) -> StepOutput:
        assert batch is not None, "build() made sure that every share holds a sample"
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
            outputs = self._forward_only.run([_model_input(measure, part) for part in parts])
        # Outputs exist on the last stage's rank only; the others measure zeros, to have the same names.
        with self._precision():
            if self._grid.is_last:
                whole = torch.cat(outputs)
                return measured(measure, _OnePass(whole), batch)
            nothing = self._outputs.empty(len(batch), self._device).zero_()
            return measured(measure, _OnePass(nothing), batch).zeroed()

    def state(self) -> dict[str, Entry]:
        """Return ``model/<name>`` and ``optim/<parameter>/<slot>`` of all stages; a collective."""
        self._equalise_buffers()
        weights = {f"model/{name}": Replicated(value) for name, value in self._model.state_dict().items()}
        return declare_everywhere({**weights, **self._update.state()})

    def live_state(self) -> dict[str, Tensor]:
        return self._update.live_state()

    def step_metrics(self) -> dict[str, float]:
        return self._update.step_metrics()

    def on_loaded(self, values: Mapping[str, Json]) -> None:
        """Send what was loaded to all replicas of a stage. A collective: only the first replica has been filled."""
        if self._grid.replicas > 1 and self._grid.ranks > 1:
            # Numbers have been filled on every rank, and Adam keeps its step count on the host.
            parts = [value for value in self.live_state().values() if value.ndim]
            broadcast_tensors(parts, self._grid.first_replica, self._replica_group)
        self._update.on_loaded(values)

    def close(self) -> None:
        for name in ("_model", "_stages", "_forward_only", "_schedule", "_update", "_objective", "_batches", "_losses"):
            self.__dict__.pop(name, None)

    def _forward_backward(self, batch: Batch) -> dict[str, Tensor]:
        """Leave the gradient of the global mean loss in ``.grad``. Returns this rank's part of each loss, by name."""
        self._batches = batch.split(self._micro_batches)
        self._losses = {}
        seed = int(torch.randint(1 << 62, ()))  # equal in a pipeline, whose ranks were seeded alike
        for stage in self._stages:
            stage.begin(seed)
        self.local_stopwatch.stop()  # from here on ranks wait for each other
        # The first stage gets the inputs, and every stage where a layer takes them. The last stage gets the numbers of
        # the micro-batches, by which _loss() finds them.
        inputs: tuple[Tensor, ...] = ()
        given: dict[str, Tensor] = {}
        if self._grid.is_first or self._hands_inputs:
            rows: list[Tensor] = []
            for micro_batch in self._batches:
                own = _model_input(self._objective, micro_batch)
                # Shorter micro-batches are filled up with copies of their last sample.
                rows += [own, own[-1:].expand(self._size - len(own), *own.shape[1:])]
            whole = torch.cat(rows)
            inputs = (whole,) if self._grid.is_first else ()
            given = {"given": whole} if self._hands_inputs else {}
        numbers = torch.arange(self._micro_batches) if self._grid.is_last else None
        self._schedule.step(*inputs, target=numbers, **self._no_outputs, **given)
        return self._complete(batch.global_count)

    def _loss(self, outputs: Tensor, number: Tensor) -> Tensor:
        """Return the loss of micro-batch ``number``. It is divided as if each sample of the global batch weighed one.

        torch's pipelining also calls it to probe.
        """
        batch = self._batches[int(number)]
        with self._precision():
            losses = self._objective(model := _OnePass(outputs[: len(batch)], refuses=False), batch)
        if model.calls > 1:
            # In the trial pass all ranks are to refuse it together, see _prime(): this rank alone has the loss.
            if not isinstance(self._objective, CheckedObjective):
                raise ExtraForwardError(_AGAIN)
            self._objective.refusal = _AGAIN
        refuse_other_weights(losses, "strategy.name: pipeline")
        parts: list[Tensor] = []
        kept = self._losses[int(number)] = {}
        for name, loss in losses.items():
            parts.append(loss.total / batch.global_count)
            kept[name] = Loss(parts[-1].detach(), loss.weight)
        return sum(parts[1:], parts[0])

    def _complete(self, samples: int) -> dict[str, Tensor]:
        """Turn the gradients of this pipeline into those of the global batch. Return the mean losses."""
        gradients = [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]
        if self._grid.replicas > 1:
            sum_tensors(gradients, self._replica_group)
        passes = [*self._losses.values()]
        nothing = {name: torch.zeros((), device=self._device) for name in self._names}
        means = means_of(passes) if passes else nothing
        if not self._weighs:
            return means
        # Losses with weights of their own: only the last stage's ranks know them, so all ranks sum.
        weight = total_weight(passes)
        if weight is None:
            weight = torch.zeros((), dtype=torch.float64, device=self._device)
        factor = (samples / sum_across_ranks(weight).clamp(min=1e-30)).float()  # a weight of 0 leaves gradients of 0
        torch._foreach_mul_(gradients, factor)
        return {name: mean * factor for name, mean in means.items()}

    def _precision(self) -> AbstractContextManager[object]:
        return autocast(self._device, self._train.precision)

    def _equalise_buffers(self) -> None:
        """Equalize the buffers of the replicas, which have other samples."""
        if self._grid.replicas > 1:
            self._update.broadcast_buffers(self._grid.first_replica, self._replica_group)

    def _prime(self, batch: Batch) -> None:
        """Make one pass that changes only torch's pipeline (and the compiler's cache)."""
        objective = self._objective
        # The last stage would draw other random numbers for the model's inputs than the first.
        with same_randomness():
            before = rng_fingerprint()
            _model_input(objective, batch.part(0, 1))
            draws = rng_fingerprint() != before
        if draws:
            raise ConfigError(
                "strategy.name: pipeline makes the model's inputs on one rank and the loss on another, and the loss "
                f"({objective.where}) draws random numbers before it calls the model; draw them in the data set, or "
                "use ddp or fsdp"
            )
        self._weighs, self._names = False, ("",)
        # The first call of the objective is torch's probe.
        primed = priming(objective, self._train, self._model, self._session.activity, probes=1)
        following: AbstractContextManager[None] = nullcontext()
        if self._grid.replicas > 1:
            following = self._update.track_changed_buffers(self._grid.first_replica, self._replica_group)
        with primed as checked, following:
            self._objective = checked
            self.local_stopwatch.start()
            try:
                self._forward_backward(batch)
            except RuntimeError as error:
                # Raise a layer's own error, which torch's pipelining hides behind one of its own.
                if "failed to run forward" in str(error) and error.__cause__ is not None:
                    raise error.__cause__ from None
                raise
        self._objective = objective
        self.local_stopwatch.take()  # it may have compiled the model
        refuse_together(checked.refusal, params_without_grad(self._model))
        self._update.drop()
        # The last rank has the last stage: only it has seen the outputs and the losses.
        weighs = any(weight is not None for weight in weights_of([*self._losses.values()]))
        seen = self._stages[-1].gives, weighs, checked.names
        self._outputs, self._weighs, self._names = broadcast_object(self._session.world_size - 1, seen)


class _OnePass:
    """Stands for the model, whose one pass has been made, and gives its outputs."""

    def __init__(self, outputs: Tensor, *, refuses: bool = True) -> None:
        self._outputs, self._refuses = outputs, refuses
        self.calls = 0

    def __call__(self, *_: Any) -> Tensor:
        """Return the outputs. Raises OnePassError at the second call, unless the caller looks at ``calls``."""
        self.calls += 1
        if self.calls > 1 and self._refuses:
            raise ExtraForwardError(_AGAIN)
        return self._outputs


_AGAIN = (
    "strategy.name: pipeline makes one pass through the model for a batch, and the job calls the model again for it; "
    "make it one call, or use ddp or fsdp"
)


def _model_input(call: Callable[[Forward, Batch], object], batch: Batch) -> Tensor:
    """Return what a loss or a measure gives the model for ``batch``. Raises ConfigError unless that is one tensor."""
    args, kwargs = capture_model_inputs(call, batch) or ((), {})
    if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
        given = [type(value).__name__ for value in args] + [f"{name}=..." for name in kwargs]
        raise ConfigError(
            "strategy.name: pipeline hands one tensor from layer to layer, and the job calls the model with "
            f"({', '.join(given)}): give it one tensor, or use ddp or fsdp"
        )
    return args[0]


def build(config: StrategyConfig, session: Session, train: TrainConfig) -> Strategy:
    """Return the strategy; its model is not built yet."""
    refuse_gloo_on_gpus(config.name, session)
    return Pipeline(session, config, train)


def build_schedule(
    name: str,
    grid: Grid,
    line: dist.ProcessGroup,
    modules: Sequence[StageModule],
    device: torch.device,
    micro_batches: int,
    loss: Callable[[Tensor, Tensor], Tensor],
) -> Any:
    """Return the schedule ``name`` for ``modules``, this rank's stages; ``line`` is the group of the pipeline's ranks.

    The last stage's rank calls ``loss(outputs, target)``, which divides by all samples: torch scales no gradients.
    """
    if not hasattr(schedules, "_wait_batch_p2p"):  # torch < 2.8
        schedules._batch_p2p = _start_all  # type: ignore[assignment]  # as torch < 2.8 has it
    stages = [
        PipelineStage(module, stage, grid.stage_count, device, group=line)
        for module, stage in zip(modules, grid.stages, strict=True)
    ]
    unscaled = older_torch.supported_options(ScheduleGPipe, scale_grads=False)  # torch 2.6 scales none
    if len(stages) > 1:
        return ScheduleInterleaved1F1B(stages, micro_batches, loss_fn=loss, **unscaled)  # type: ignore[arg-type]
    # A single rank makes the same steps with interleaved as with 1f1b.
    kinds: dict[str, Callable[..., Any]]
    kinds = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": Schedule1F1B}
    kind = choose("strategy.pipeline.schedule", name, kinds)
    return kind(stages[0], micro_batches, loss_fn=loss, **unscaled)


def _start_all(transfers: list[dist.P2POp], desc: str | None = None) -> SimpleNamespace | None:
    """Start a batch of transfers as one, as torch's ``_batch_p2p()``: that of torch < 2.8 keeps the last one only.

    Over gloo each tensor is a transfer of its own. A send that nobody keeps is dropped before it is done, and the ranks
    wait for each other for ever.
    """
    works = dist.batch_isend_irecv(transfers) if transfers else []

    def wait() -> None:
        for work in works:
            work.wait()

    return SimpleNamespace(wait=wait) if works else None
