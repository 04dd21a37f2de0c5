"""The training loop. Its state is the step number: batches and learning rate are functions of it.

There are two exceptions. A loader of streams has a position of its own, for which the checkpoints ask it. Shares that
follow the ranks' speeds are saved with the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from logging import INFO, WARNING
from typing import Any, TypeAlias

from toolkit import hang
from toolkit.base import logs
from toolkit.config import TrainConfig
from toolkit.config.learning_rate import Schedule, rate_change, rates_at, total_steps
from toolkit.data.loader import Batches
from toolkit.data.randomness import reseed
from toolkit.metrics.sinks import Sink
from toolkit.ranks.session import Session
from toolkit.ranks.state import Json
from toolkit.strategies.protocol import Strategy
from toolkit.train import parts
from toolkit.train.checkpoints import Checkpoints
from toolkit.train.evaluate import Evaluate, Evaluations
from toolkit.train.job import Hooks
from toolkit.train.lifecycle import Lifecycle
from toolkit.train.loss_windows import LossWindow
from toolkit.train.not_finite import NotFinite, SkippedSteps

log = logs.get(__name__)

#: Tag for the number of logging steps whose mean loss was not finite; logged only when there were some.
NOT_FINITE = "train/not_finite"
#: Called once in a run's life, at its fresh start.
Describe: TypeAlias = Callable[[Sink], None]
#: Called after each evaluation with the step, on every rank, to log what TensorBoard is to get beside the figures.
Show: TypeAlias = Callable[[Sink, int], None]


@dataclass(frozen=True)
class Result:
    """The end of a training: steps, whole epochs and samples done, and the last metrics."""

    step: int
    epoch: int
    samples: int
    metrics: Mapping[str, float]


class Trainer:
    """Trains from the run's newest checkpoint to the last step. Every rank runs one, in lock step."""

    def __init__(
        self,
        config: TrainConfig,
        session: Session,
        strategy: Strategy,
        loader: Batches,
        *,
        schedule: Callable[[int], Schedule],
        checkpoints: Checkpoints,
        rate_keys: Mapping[str, Any] | None = None,
    ) -> None:
        """Take the parts; ``schedule(total_steps)`` gives the learning rate as a function of the step.

        ``rate_keys`` are the values of the config that the rate follows from.
        """
        if loader.is_split:
            strategy.split_data()
        trace = parts.trace(session)  # it wraps the loader and the strategy
        if trace is not None:
            loader, strategy = trace.watch(loader, strategy)
        self._config = config
        self._session = session
        self._activity = session.activity
        self._strategy = strategy
        self._loader = loader
        self._checkpoints = checkpoints
        checkpoints.include(loader)  # also refuses ranks with different data sets, before the first step
        self._total = total_steps(config, loader.dataset_size, loader.global_batch_size)
        self._lr, self._rate_keys = schedule(self._total), rate_keys or {}
        self._life = Lifecycle(session, checkpoints, self, log_every=config.log_every)
        # Collected over the steps, and read and logged at logging steps.
        self._loss = LossWindow(session.rank, session.world_size, strategy.by_rank)
        self._pace = parts.rank_pace(session)
        self._balance = parts.share_balance(loader, strategy, session.world_size, config.accumulate)
        self._bad_samples = parts.bad_sample_list(loader, session)
        self._skipped = SkippedSteps(config, session, loader)
        self._not_finite = NotFinite(config, session, strategy, loader, checkpoints.roll_back)

    def fit(
        self,
        evaluate: Evaluate | None,
        describe: Describe = lambda sink: None,
        show: Show = lambda sink, step: None,
        hooks: Hooks | None = None,
    ) -> Result:
        """Train to the last step, with evaluations, checkpoints and metrics. The session gets the result.

        A run whose checkpoint is at the last step already is evaluated once, if it was not yet, and is then done.
        Raises StoppedError, with everything committed, when the ranks have agreed to stop.
        """
        self._show, self._hooks = show, hooks or Hooks()
        seed, sheet = self._config.seed, self._life.sheet
        self._evaluations = Evaluations(self._session, self._strategy, sheet, evaluate, self._hooks, seed)
        loaded = self._life.resume()
        if loaded is not None:
            self._restore(loaded.meta)
        log.info("training from step %d to %d", self._step, self._total)
        self._strategy.begin(self._step)
        with self._life.open():
            if loaded is None:
                describe(self._life.sink)
            # From here on the time counts; what was before is start-up.
            self._life.begin()
            # Make up for an evaluation that was due at the checkpoint, if a stop cut it short.
            if loaded is not None and self._step and self._evaluation_owed():
                if self._evaluate():
                    self._life.keep_best()
                self._end_epoch()
            self._train(None if loaded is None else loaded.meta)
            self._life.sink.completed(self._step)
        # The metrics' files and the checkpoints are closed: the result comes last, and marks the run as completed.
        samples = self._step * self._loader.global_batch_size
        result = Result(self._step, self._epochs(self._step), samples, dict(self._life.metrics))
        self._life.finish(asdict(result))
        return result

    @property
    def _step(self) -> int:
        return self._life.step

    def _restore(self, meta: Mapping[str, Any]) -> None:
        self._evaluations.restore(meta, self._step)
        if self._evaluations.newest is not None:
            self._end_if_done()
        self._loss.restore(meta["loss_window"])
        if self._balance is not None:
            self._balance.restore(meta.get("shares"))
        self._skipped.restore(meta["skipped_steps"])
        self._not_finite.restore(meta)
        self._not_finite.count = int(self._life.metrics.get(NOT_FINITE, 0))

    def _train(self, resumed: Mapping[str, Any] | None = None) -> None:
        self._life.throughput.reset()
        self._life.boundary()
        # Only now: what a user has set at the checkpoint's step is set again in the boundary.
        if resumed is not None:
            self._log_rate_change(resumed["learning_rate"])
        begun: int | None = None  # the epoch last announced to the job
        while self._step < self._total:
            if begun != (epoch := self._epochs(self._step)):
                self._hooks.on_epoch_start(epoch)
                begun = epoch
            self._train_step()
            # Log before evaluating and saving: a rollback happens here, and a loss that is not finite is found.
            if self._due(self._config.log_every):
                self._log()
            is_best = self._evaluation_due() and self._evaluate()
            self._end_epoch()
            is_last = self._step == self._total
            self._life.save_or_copy(is_best or is_last or self._checkpoints.saver.is_due(self._step), must=is_last)
            # Stop or save here, if all ranks have agreed on this step.
            self._life.boundary()

    def _end_epoch(self) -> None:
        """Tell the job of an epoch's end, if the last step was one. After an evaluation cut short, a resume does so."""
        epoch = self._epochs(self._step)
        if epoch > self._epochs(self._step - 1) and not self._evaluation_owed():
            self._hooks.on_epoch_end(epoch - 1, self._life.metrics)

    def _train_step(self) -> None:
        n = self._step
        # The own time includes the fetch of the batch, so that a slow loader shows.
        self._strategy.own_time.start()
        reseed(self._config.seed, n, self._strategy.share.index)
        self._activity.phase = hang.WAITING_FOR_DATA
        batch = self._loader.at(n)
        if self._bad_samples is not None:
            self._bad_samples.note(batch)
        self._activity.phase = hang.IN_STEP
        output = self._strategy.step(batch, self._lr(n))
        # Nothing is read from the device here: the verdict and the losses wait for the next logging step.
        self._skipped.note(n, output.skipped)
        self._loss.add(output)
        self._life.step_done(self._loader.global_batch_size, self._loader.data_wait_s)

    # ------------------------------------------------------------------------------------- what is due, by the step

    def _due(self, every: int) -> bool:
        return self._step % every == 0 or self._step == self._total

    def _evaluation_due(self) -> bool:
        every = self._config.eval_every  # a number of steps, or ``epoch``
        if not self._evaluations.are_made:
            return False
        if isinstance(every, int):
            return self._due(every)
        return self._epochs(self._step) > self._epochs(self._step - 1) or self._step == self._total

    def _evaluation_owed(self) -> bool:
        """True if this step's evaluation is due and not complete. Then a stop has cut it short."""
        return self._evaluation_due() and self._evaluations.newest != self._step

    def _epochs(self, step: int) -> int:
        """Return the whole epochs in ``step`` steps."""
        return step * self._loader.global_batch_size // self._loader.dataset_size

    # ------------------------------------------------------------------------------------------ between the steps

    def _log(self) -> None:
        """Write the metrics since the last logging step. Here, and before saves, the host waits for the device."""
        self._activity.phase = hang.LOGGING
        # First the verdicts: steps that were left out must not count in the means below.
        self._loss.leave_out(self._skipped.read())
        if self._skipped.rollback_due:
            self._roll_back()
        losses, own_s = self._loss.take(self._strategy.own_time.take())
        values = {
            "train/lr": self._lr(self._step - 1),
            **self._life.figures(self._hooks.speed),
            **(self._pace.compare(own_s) or {}),
            **(self._balance.update(self._step, own_s) if self._balance is not None else {}),
            **self._skipped.figures(),
        }
        if self._bad_samples is not None:
            values |= self._bad_samples.figures(self._step * self._loader.global_batch_size)
        values |= self._life.show_tensors(self._strategy.figures())
        metrics = self._life.metrics
        values |= {f"train/{name}": loss for name, loss in losses.items()}
        # There is no mean where each step since the last logging step was left out.
        if losses:
            metrics["train/loss"] = losses["loss"]
            self._not_finite.judge(self._step, losses["loss"], self._loss.taken)
        if self._not_finite.count:
            metrics[NOT_FINITE] = values[NOT_FINITE] = self._not_finite.count
        metrics |= self._skipped.figures()
        self._life.write(values)

    def _log_rate_change(self, saved: Mapping[str, Any]) -> None:
        """Say how the rate goes on, where it is not as the run would have gone on with its earlier config."""
        rate, run_id = self._lr(self._step), self._session.run_dir.name
        change = rate_change(saved, self._step, rate, self._total, self._rate_keys, run_id)
        if change is not None and self._session.is_main:
            log.log(INFO if change.is_asked else WARNING, "%s", change.text)

    def _roll_back(self) -> None:
        """Load the weights of a checkpoint, on all ranks alike. The step, the data and the learning rate go on."""
        self._activity.phase = hang.LOADING
        with self._life.sheet.on("checkpoint"):
            to = self._checkpoints.roll_back(self._step, self._skipped.first_in_row)
        self._skipped.rolled_back(self._step, to)
        self._activity.phase = hang.LOGGING

    def _evaluate(self) -> bool:
        """Evaluate, and log the figures. Return True if the model has never been as good."""
        self._life.report("evaluate")
        with self._life.sheet.on("evaluation"), self._checkpoints.saver.timer.held():
            figures = self._evaluations.evaluate(self._step)
        if figures is None:
            return False
        self._life.metrics |= figures
        self._life.sink.scalars(self._step, figures)
        self._show(self._life.sink, self._step)
        self._end_if_done()
        self._life.report("train")
        self._life.throughput.pause()
        return self._checkpoints.saver.is_best(self._life.metrics)

    def _end_if_done(self) -> None:
        if self._step < self._total and self._evaluations.are_enough():
            log.info("step %d of %d: the job says that it is done", self._step, self._total)
            self._total = self._step

    # ------------------------------------------------------------------------------------------ for the lifecycle

    def may_save(self, *, must: bool) -> bool:
        """See :class:`~toolkit.train.lifecycle.Loop`."""
        self._loss.leave_out(self._skipped.read())
        if self._skipped.saves_wait and not must:
            log.info("step %d is not saved: the steps before it were left out", self._step)
            return False
        return self._not_finite.may_save(self._step, is_last=self._step == self._total)

    def saved_with(self) -> dict[str, Json]:
        """See :class:`~toolkit.train.lifecycle.Loop`."""
        kept: dict[str, Json] = {
            **self._evaluations.state(),
            "loss_window": self._loss.state(),
            "skipped_steps": self._skipped.state(),
            "shares": None if self._balance is None else self._balance.state(),
            **self._not_finite.state(),
            "learning_rate": rates_at(self._lr, self._step, self._rate_keys, self._loader.dataset_size),
        }
        if self._bad_samples is not None:
            self._bad_samples.collect()  # after the collective in state(): rank 0 then has all reports up to this step
        return kept

    def progress(self) -> dict[str, Any]:
        """See :class:`~toolkit.train.lifecycle.Loop`."""
        return {
            "total_steps": self._total,
            "epoch": self._epochs(self._step),
            "epochs": self._config.epochs,
            "stragglers": self._pace.stragglers() or [],
        }
