"""The training loop. The step number is the whole of its state: batches and learning rate are functions of it.

Only a loader of streams has a place of its own to save, which the checkpoints ask it for, and shares that follow the
ranks' speeds are saved with the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from toolkit import activity, logs
from toolkit.config import TrainConfig
from toolkit.data.bad_samples import BadSamples
from toolkit.dist.batch import Batch, Share
from toolkit.dist.session import Session
from toolkit.dist.state import Json
from toolkit.dist.stop import STOP
from toolkit.errors import RankLostError
from toolkit.metrics.pace import Pace
from toolkit.metrics.sinks import Sink
from toolkit.strategies.protocol import StepOutput, Strategy
from toolkit.train.balance import build_balance
from toolkit.train.hooks import Hooks
from toolkit.train.lifecycle import Lifecycle
from toolkit.train.not_finite import NotFinite
from toolkit.train.optim import Schedule
from toolkit.train.seeds import reseed
from toolkit.train.skipped import SkippedSteps
from toolkit.train.state import Checkpoints, conditions
from toolkit.train.witness import summoned

log = logs.get(__name__)

#: How many logging steps have had a mean loss that was not finite; there only when there were some.
NOT_FINITE = "train/not_finite"
#: The figures of one evaluation by name (``accuracy``), or None when it was cut short because the second argument said
#: so; called on every rank, equal on every rank. The second argument is to be asked after each batch: an evaluation
#: that asks nothing for half of ``dist.timeout_s`` is taken for a hang.
Evaluate: TypeAlias = Callable[[Strategy, Callable[[], bool]], Mapping[str, float] | None]
#: Called once in a run's life, at its fresh start.
Describe: TypeAlias = Callable[[Sink], None]
#: Called after each evaluation with the step, on every rank: what TensorBoard is to get beside the figures.
Show: TypeAlias = Callable[[Sink, int], None]


class Batches(Protocol):
    """What the loop needs of :class:`toolkit.data.loader.Loader`, or of a loader of streams."""

    dataset_size: int
    global_batch_size: int
    data_wait_s: float
    max_bad_samples: int | None
    balances: bool
    is_split: bool
    ahead: int

    def at(self, step: int) -> Batch | None: ...

    def cut(self, step: int, counts: Sequence[int]) -> None:
        """See :class:`toolkit.data.loader.Loader`; called where it ``balances``."""

    def part(self, step: int, share: Share) -> Batch:
        """``at(step)`` of the rank that holds ``share``."""

    def fingerprint(self) -> str | None:
        """What the data set is, in words that are equal for the same one; None where it cannot be told."""

    def global_samples(self, step: int) -> list[int]:
        """Which samples all ranks together get in ``step``."""

    def state(self) -> Json:
        """What this rank's part of a checkpoint must hold of it; None where the step says all."""

    def restore(self, state: Json) -> None:
        """Go on from a :meth:`state`, whatever was read before."""


@dataclass(frozen=True)
class Result:
    """Where the training ended: steps done, whole epochs and samples seen, the last figure of each metric."""

    step: int
    epoch: int
    samples: int
    metrics: Mapping[str, float]


def total_steps(config: TrainConfig, dataset_size: int, global_batch_size: int) -> int:
    """Steps that see each sample ``config.epochs`` times, the last batch running over, or ``max_steps`` if less."""
    steps = -(-config.epochs * dataset_size // global_batch_size)
    return steps if config.max_steps is None else min(steps, config.max_steps)


class Trainer:
    """Trains from where the run's newest checkpoint stands to the last step. Every rank runs one, in lock step."""

    def __init__(
        self,
        config: TrainConfig,
        session: Session,
        strategy: Strategy,
        loader: Batches,
        *,
        schedule: Callable[[int], Schedule],
        checkpoints: Checkpoints,
    ) -> None:
        """``schedule(total_steps)`` gives the learning rate as a function of the step."""
        if loader.is_split:
            strategy.split_data()
        witness = summoned(session, conditions)
        if witness is not None:
            loader, strategy = witness.watch(loader, strategy)
        self._config = config
        self._session = session
        self._activity = session.activity
        self._strategy = strategy
        self._loader = loader
        self._checkpoints = checkpoints
        checkpoints.include(loader)
        self._total = total_steps(config, loader.dataset_size, loader.global_batch_size)
        self._lr = schedule(self._total)
        self._life = Lifecycle(session, checkpoints, self, log_every=config.log_every)
        self._loss = LossWindow(session.rank, session.world_size, strategy.by_rank)
        self._pace = Pace(session)
        self._balance = build_balance(loader, strategy.share, session.world_size, config.accumulate)
        self._bad_samples = BadSamples(session, loader.max_bad_samples)
        self._skipped = SkippedSteps(config, session, loader)
        self._not_finite = NotFinite(config, session, strategy, loader, checkpoints.roll_back)
        self._weights_are_finite = True
        self._evaluated: int | None = None
        self._evaluations: list[dict[str, float]] = []  #: the figures of each, where the job asks for them

    def fit(
        self,
        evaluate: Evaluate | None,
        describe: Describe = lambda sink: None,
        show: Show = lambda sink, step: None,
        hooks: Hooks | None = None,
    ) -> Result:
        """Train to the last step, with evaluations, checkpoints and metrics on the way; the session gets the result.

        A run whose checkpoint is at the last step already is evaluated once, if it was not yet, and done. Raises
        StoppedError, with everything committed, when the ranks have agreed to stop.
        """
        self._evaluate_model, self._show, self._hooks = evaluate, show, hooks or Hooks()
        loaded = self._life.resume()
        if loaded is not None:
            self._restore(loaded.meta)
        log.info("training from step %d to %d", self._step, self._total)
        self._strategy.begin(self._step, self._again)
        with self._life.open(self._strategy.expendable):
            if loaded is None:
                describe(self._life.sink)
            self._life.begin()
            if loaded is not None:
                self._make_up()
            self._train()
        samples = self._step * self._loader.global_batch_size
        result = Result(self._step, self._epochs(self._step), samples, dict(self._life.metrics))
        self._life.finish(asdict(result))
        return result

    @property
    def _step(self) -> int:
        return self._life.step

    def _restore(self, meta: Mapping[str, Any]) -> None:
        self._evaluated = self._step if meta.get("evaluated") == self._step else None
        self._evaluations = [dict(figures) for figures in meta.get("evaluations", ())]
        if self._evaluated is not None:
            self._end_if_done()
        self._loss.restore(meta.get("loss_window"))
        self._balance.restore(meta.get("shares"))
        self._skipped.restore(meta.get("skipped_steps"))
        self._not_finite.count = int(self._life.metrics.get(NOT_FINITE, 0))

    def _make_up(self) -> None:
        """An evaluation that was due at the checkpoint and was cut short by the stop that made it."""
        if self._step and self._evaluation_due() and self._evaluated != self._step:
            self._evaluate()

    def _train(self) -> None:
        share = self._strategy.share.index  # once: the strategy's is another one for evaluations when a rank has died
        self._life.throughput.reset()
        self._life.boundary()
        begun: int | None = None  # the epoch that the job has heard of
        while self._step < self._total:
            if begun != (epoch := self._epochs(self._step)):
                self._hooks.on_epoch_start(epoch)
                begun = epoch
            self._train_step(share)
            if self._due(self._config.log_every):
                self._log()
            is_best = self._evaluation_due() and self._evaluate()
            if self._epochs(self._step) > epoch:
                self._hooks.on_epoch_end(self._epochs(self._step) - 1, self._life.metrics)
            if is_best or self._checkpoints.due(self._step) or self._step == self._total:
                self._life.save(must=self._step == self._total)
            elif self._checkpoints.is_due_in_memory(self._step):
                self._life.keep_in_memory()
            self._life.boundary()

    def _train_step(self, share: int) -> None:
        n = self._step
        self._strategy.own_time.start()
        reseed(self._config.seed, n, share)
        self._activity.phase = activity.WAITING_FOR_DATA
        batch = self._loader.at(n)
        self._bad_samples.note(batch)
        self._activity.phase = activity.IN_STEP
        output = self._strategy.step(batch, self._lr(n))
        self._skipped.note(n, output.skipped)
        self._loss.add(output)
        self._life.step_done(self._loader.global_batch_size, self._loader.data_wait_s)

    def _again(self, step: int, share: Share) -> Batch:
        """What the rank that holds ``share`` gets in ``step``, and draws its random numbers from."""
        reseed(self._config.seed, step, share.index)
        batch = self._loader.part(step, share)
        self._bad_samples.note(batch)
        return batch

    # ------------------------------------------------------------------------------------- what is due, by the step

    def _due(self, every: int) -> bool:
        return self._step % every == 0 or self._step == self._total

    def _evaluation_due(self) -> bool:
        every = self._config.eval_every
        if self._evaluate_model is None:
            return False
        if isinstance(every, int):
            return self._due(every)
        return self._epochs(self._step) > self._epochs(self._step - 1) or self._step == self._total

    def _epochs(self, step: int) -> int:
        """Whole epochs that ``step`` steps have seen."""
        return step * self._loader.global_batch_size // self._loader.dataset_size

    # ------------------------------------------------------------------------------------------ between the steps

    def _log(self) -> None:
        """The only place where the host waits for the device."""
        self._activity.phase = activity.LOGGING
        self._read_skipped()
        if self._skipped.rollback_due:
            self._roll_back()
        losses, own_s = self._loss.take(self._strategy.own_time.take())
        values = {
            "train/lr": self._lr(self._step - 1),
            **self._life.figures(),
            **self._pace.compare(own_s),
            **self._balance.update(self._step, own_s),
            **self._skipped.figures(),
            **self._bad_samples.figures(self._step * self._loader.global_batch_size),
        }
        for tag, figure in self._strategy.figures().items():
            if isinstance(figure, Tensor):
                self._life.sink.histogram(self._step, tag, figure)
            else:
                values[tag] = figure
        metrics = self._life.metrics
        values |= {f"train/{name}": loss for name, loss in losses.items()}
        if losses:
            metrics["train/loss"] = losses["loss"]
            self._not_finite.judge(self._step, losses["loss"], self._loss.taken)
        if self._not_finite.count:
            metrics[NOT_FINITE] = values[NOT_FINITE] = self._not_finite.count
        metrics |= self._skipped.figures()
        self._life.write(values)

    def _read_skipped(self) -> None:
        self._loss.leave_out(self._skipped.read())

    def _roll_back(self) -> None:
        """To the weights of a checkpoint, on all ranks alike: the step, the data and the learning rate go on."""
        self._activity.phase = activity.LOADING
        with self._life.sheet.on("checkpoint"):
            to = self._checkpoints.roll_back(self._step, self._skipped.first_in_row)
        self._skipped.rolled_back(self._step, to)
        self._activity.phase = activity.LOGGING

    def _evaluate(self) -> bool:
        """Whether the model has never been as good."""
        self._life.report("evaluate")
        self._activity.phase = activity.EVALUATING
        with self._life.sheet.on("evaluation"):
            found = self._evaluated_by_the_living()
        if found is None:
            log.info("step %d: evaluation cut short to stop", self._step)
            return False
        figures = {f"eval/{name}": value for name, value in found.items()}
        self._life.metrics |= figures
        self._evaluated = self._step
        self._life.sink.scalars(self._step, figures)
        self._show(self._life.sink, self._step)
        log.info("step %d: %s", self._step, ", ".join(f"{name} {value:.4f}" for name, value in figures.items()))
        if type(self._hooks).is_done is not Hooks.is_done:
            self._evaluations.append(figures)
            self._end_if_done()
        self._life.report("train")
        self._life.throughput.pause()
        return self._checkpoints.is_best(self._life.metrics)

    def _end_if_done(self) -> None:
        if self._step < self._total and self._evaluations and self._hooks.is_done(self._evaluations):
            log.info("step %d of %d: the job says that it is done", self._step, self._total)
            self._total = self._step

    def _evaluated_by_the_living(self) -> Mapping[str, float] | None:
        """Again, if a rank dies over it: all hear of that at the same point."""
        assert self._evaluate_model is not None
        while True:
            try:
                return self._evaluate_model(self._strategy, self._is_cut)
            except RankLostError as error:
                log.warning("step %d: evaluating again: %s", self._step, error)

    def _is_cut(self) -> bool:
        """An evaluation makes room for a stop, which has seconds; it is made up for at the resume.

        It asks after each batch, which shows as well that it gets on.
        """
        self._activity.move()
        self._life.sheet.add("evaluation")
        return self._session.gate.pending == STOP

    # ------------------------------------------------------------------------------------------ for the lifecycle

    def may_save(self, *, must: bool) -> bool:
        """See :class:`~toolkit.train.lifecycle.Loop`."""
        self._read_skipped()
        if self._skipped.saves_wait and not must:
            log.info("step %d is not saved: the steps before it were left out", self._step)
            return False
        self._weights_are_finite = self._not_finite.weights_are_finite()
        if self._weights_are_finite or not self._not_finite.stops:
            return True
        if self._step == self._total:
            self._not_finite.refuse(self._step)
        log.warning("step %d is not saved: the weights are not finite", self._step)
        return False

    def saved_with(self) -> dict[str, Json]:
        """See :class:`~toolkit.train.lifecycle.Loop`."""
        kept: dict[str, Json] = {
            "evaluated": self._evaluated,
            "loss_window": self._loss.state(),
            "skipped_steps": self._skipped.state(),
            "shares": self._balance.state(),
            "finite": self._weights_are_finite,
            **({"evaluations": [*self._evaluations]} if self._evaluations else {}),
        }
        self._bad_samples.collect()  # after the sum in state(): rank 0 hears of everything up to this step
        return kept

    def progress(self) -> dict[str, Any]:
        """See :class:`~toolkit.train.lifecycle.Loop`."""
        return {
            "total_steps": self._total,
            "epoch": self._epochs(self._step),
            "epochs": self._config.epochs,
            "stragglers": self._pace.stragglers,
        }


class LossWindow:
    """The means of the global losses over the steps since they were last taken; kept on the device until then.

    ``by_rank`` is :meth:`Strategy.by_rank`.
    """

    def __init__(
        self, rank: int, world_size: int, by_rank: Callable[[Mapping[str, float | Tensor]], Mapping[str, Tensor]]
    ) -> None:
        self._rank, self._world_size, self._by_rank = rank, world_size, by_rank
        self._sums: dict[str, Tensor] = {}
        #: The losses that were added since the last :meth:`take`, and before it.
        self._losses: list[Tensor] = []
        self.taken: list[Tensor] = []
        self._steps = 0
        self._before: dict[str, float] = {}  # of a restored window, until the first step tells the type and the device

    def add(self, output: StepOutput) -> None:
        """Add one step's losses: their sum as ``loss``, and each that has a name."""
        counted = output.counted()
        for name, loss in counted.items():
            if name in self._sums:
                self._sums[name].add_(loss)
            else:
                self._sums[name] = loss + self._before.get(name, 0.0)
        self._losses.append(counted["loss"])
        self._steps += 1

    def leave_out(self, steps: int) -> None:
        """So many of the losses added were 0 because their steps were left out: the means are over the others."""
        self._steps -= steps

    def state(self) -> dict[str, Any]:
        """For a checkpoint, equal on every rank; a collective and a host sync unless the window is empty."""
        if not self._sums:
            return {"steps": 0, "sums": {}}
        sums = self._by_rank(self._sums)
        return {"steps": self._steps, "sums": {name: sums[name].tolist() for name in self._sums}}

    def restore(self, saved: Any) -> None:
        """Go on from a :meth:`state`; of another number of ranks the sum of all is rank 0's."""
        saved = saved or {"steps": 0, "sums": {}}
        self._steps = saved["steps"]
        for name, sums in saved["sums"].items():
            is_same = len(sums) == self._world_size
            self._before[name] = sums[self._rank] if is_same else float(self._rank == 0) * sum(sums)

    def take(self, figure: float) -> tuple[dict[str, float], list[float]]:
        """The means by name, and the ``figure`` of each rank, equal on every rank; one collective, one host sync.

        There are no means where each step was left out.
        """
        assert self._sums, "a step comes before each logging step"
        found = self._by_rank({**self._sums, "": figure})  # no loss has that name
        means = {name: found[name].sum().item() / self._steps for name in self._sums} if self._steps else {}
        self.taken, self._losses = self._losses, []
        self._sums, self._steps, self._before = {}, 0, {}
        return means, found[""].tolist()
